builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>) -> (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) {
    %a = mo.transpose(%x) {perm = array<i64: 1, 0>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[8, n], f32, cpu:0>
    %d = mo.reshape(%x) : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n * 8], f32, cpu:0>
    %g = mo.neg(%x) : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    mo.output(%x, %g) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> ()
  }
}
