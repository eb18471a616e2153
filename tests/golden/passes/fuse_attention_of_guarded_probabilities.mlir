builtin.module {
  mo.graph @g(%q: !mo.tensor<[b, 4, n, 8], f32, cpu:0>, %k: !mo.tensor<[b, 4, n, 8], f32, cpu:0>) -> (!mo.tensor<[b, 4, n, 8], f32, cpu:0>) {
    mok.check() {sides = #mo.shape<[17592186044416, b * n * n * 4]>, exact = false, message = "mok.matmul: the number of elements of the result"} : () -> ()
    %o = mok.attention(%q, %k, %k) {scale = 1.000000e+00 : f64, fills = array<i64>, roundings = [unit, unit], axis = 2 : i64, dtype = #mo.dtype<f32>, guard = "nan"} : (!mo.tensor<[b, 4, n, 8], f32, cpu:0>, !mo.tensor<[b, 4, n, 8], f32, cpu:0>, !mo.tensor<[b, 4, n, 8], f32, cpu:0>) -> !mo.tensor<[b, 4, n, 8], f32, cpu:0>
    mo.output(%o) : (!mo.tensor<[b, 4, n, 8], f32, cpu:0>) -> ()
  }
}
