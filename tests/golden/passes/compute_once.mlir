builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>) -> (!mo.tensor<[n, 16], f32, cpu:0>) {
    %w = mo.constant.external() {name = "w"} : () -> !mo.tensor<[16, 8], bf16, cpu:0>
    %0 = mok.once(%w) : (!mo.tensor<[16, 8], bf16, cpu:0>) -> !mo.tensor<[1, 1024], f32, cpu:0> {
    ^bb0(%1: !mo.tensor<[16, 8], bf16, cpu:0>):
      %c = mo.cast(%1) : (!mo.tensor<[16, 8], bf16, cpu:0>) -> !mo.tensor<[16, 8], f32, cpu:0>
      %2 = mok.pack(%c) {encoding = "rows"} : (!mo.tensor<[16, 8], f32, cpu:0>) -> !mo.tensor<[1, 1024], f32, cpu:0>
      mok.yield(%2) : (!mo.tensor<[1, 1024], f32, cpu:0>) -> ()
    }
    %y = mok.packed_matmul(%x, %0) {encoding = "rows", columns = 16 : i64, streamed = false} : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[1, 1024], f32, cpu:0>) -> !mo.tensor<[n, 16], f32, cpu:0>
    mo.output(%y) : (!mo.tensor<[n, 16], f32, cpu:0>) -> ()
  }
}
