builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>) -> (!mo.tensor<[n, 16], f32, cpu:0>) {
    %w = mo.constant.external() {name = "w"} : () -> !mo.tensor<[16, 8], bf16, cpu:0>
    %c = mok.once(%w) : (!mo.tensor<[16, 8], bf16, cpu:0>) -> !mo.tensor<[16, 8], f32, cpu:0> {
    ^bb0(%0: !mo.tensor<[16, 8], bf16, cpu:0>):
      %c_1 = mo.cast(%0) : (!mo.tensor<[16, 8], bf16, cpu:0>) -> !mo.tensor<[16, 8], f32, cpu:0>
      mok.yield(%c_1) : (!mo.tensor<[16, 8], f32, cpu:0>) -> ()
    }
    %y = mok.matmul(%x, %c) {transpose_b = true} : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[16, 8], f32, cpu:0>) -> !mo.tensor<[n, 16], f32, cpu:0>
    mo.output(%y) : (!mo.tensor<[n, 16], f32, cpu:0>) -> ()
  }
}
