builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>, %w: !mo.tensor<[16, 8], f32, cpu:0>) -> (!mo.tensor<[n, 16], f32, cpu:0>) {
    %t = mo.transpose(%w) {perm = array<i64: 1, 0>} : (!mo.tensor<[16, 8], f32, cpu:0>) -> !mo.tensor<[8, 16], f32, cpu:0>
    %y = mok.matmul(%x, %w) {transpose_b = true} : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[16, 8], f32, cpu:0>) -> !mo.tensor<[n, 16], f32, cpu:0>
    mo.output(%y) : (!mo.tensor<[n, 16], f32, cpu:0>) -> ()
  }
}
