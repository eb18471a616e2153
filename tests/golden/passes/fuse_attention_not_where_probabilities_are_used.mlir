builtin.module {
  mo.graph @g(%q: !mo.tensor<[b, 4, n, 8], f32, cpu:0>, %k: !mo.tensor<[b, 4, n, 8], f32, cpu:0>) -> (!mo.tensor<[b, 4, n, 8], f32, cpu:0>, !mo.tensor<[b, 4, n, n], f32, cpu:0>) {
    mok.check() {sides = #mo.shape<[17592186044416, b * n * n * 4]>, exact = false, message = "mok.matmul: the number of elements of the result"} : () -> ()
    %s = mok.matmul(%q, %k) {transpose_b = true} : (!mo.tensor<[b, 4, n, 8], f32, cpu:0>, !mo.tensor<[b, 4, n, 8], f32, cpu:0>) -> !mo.tensor<[b, 4, n, n], f32, cpu:0>
    %p = mo.softmax(%s) {axis = 3 : i64} : (!mo.tensor<[b, 4, n, n], f32, cpu:0>) -> !mo.tensor<[b, 4, n, n], f32, cpu:0>
    %o = mo.matmul(%p, %k) : (!mo.tensor<[b, 4, n, n], f32, cpu:0>, !mo.tensor<[b, 4, n, 8], f32, cpu:0>) -> !mo.tensor<[b, 4, n, 8], f32, cpu:0>
    mo.output(%o, %p) : (!mo.tensor<[b, 4, n, 8], f32, cpu:0>, !mo.tensor<[b, 4, n, n], f32, cpu:0>) -> ()
  }
}
