builtin.module {
  mo.subgraph @block(%0: !mo.tensor<[rows, 4], f32, cpu:0>, %1: !mo.buffer<[pages, 4], f32, cpu:0>, %2: !mo.chain) -> (!mo.tensor<[rows, 4], f32, cpu:0>, !mo.chain) {
    %3, %4 = mo.custom(%1, %0, %2) {symbol = "attend", parameters = {causal = true, window = 8 : i64}, device = #mo.device<cpu:0>} : (!mo.buffer<[pages, 4], f32, cpu:0>, !mo.tensor<[rows, 4], f32, cpu:0>, !mo.chain) -> (!mo.tensor<[rows, 4], f32, cpu:0>, !mo.chain)
    %5 = mo.constant.external() {name = "wo"} : () -> !mo.tensor<[4, 4], f32, cpu:0>
    %6 = mo.matmul(%3, %5) : (!mo.tensor<[rows, 4], f32, cpu:0>, !mo.tensor<[4, 4], f32, cpu:0>) -> !mo.tensor<[rows, 4], f32, cpu:0>
    mo.output(%6, %4) : (!mo.tensor<[rows, 4], f32, cpu:0>, !mo.chain) -> ()
  }
  mo.subgraph @double(%0: !mo.tensor<[rows, 4], f32, cpu:0>) -> (!mo.tensor<[rows, 4], f32, cpu:0>) {
    %1 = mo.constant() {value = #mo.dense<f32, [], [2.0]>} : () -> !mo.tensor<[], f32, cpu:0>
    %2 = mo.broadcast_to(%1) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[rows, 4], f32, cpu:0>
    %3 = mo.mul(%0, %2) : (!mo.tensor<[rows, 4], f32, cpu:0>, !mo.tensor<[rows, 4], f32, cpu:0>) -> !mo.tensor<[rows, 4], f32, cpu:0>
    mo.output(%3) : (!mo.tensor<[rows, 4], f32, cpu:0>) -> ()
  }
  mo.graph @control(%0: !mo.tensor<[n, 4], f32, cpu:0>, %1: !mo.buffer<[pages, 4], f32, cpu:0>) -> (!mo.tensor<[n - 1, 4], f32, cpu:0>, !mo.tensor<[n * 2], f32, cpu:0>) {
    %2 = mo.chain_create() : () -> !mo.chain
    %3, %4 = mo.call(%0, %1, %2) {callee = @block, prefix = "layers.0."} : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.buffer<[pages, 4], f32, cpu:0>, !mo.chain) -> (!mo.tensor<[n, 4], f32, cpu:0>, !mo.chain)
    %5, %6 = mo.call(%3, %1, %4) {callee = @block, prefix = "layers.1."} : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.buffer<[pages, 4], f32, cpu:0>, !mo.chain) -> (!mo.tensor<[n, 4], f32, cpu:0>, !mo.chain)
    %7 = mo.slice(%5) {start = #mo.shape<[1, 0]>, stop = #mo.shape<[n, 4]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n - 1, 4], f32, cpu:0>
    %8 = mo.call(%7) {callee = @double, prefix = ""} : (!mo.tensor<[n - 1, 4], f32, cpu:0>) -> !mo.tensor<[n - 1, 4], f32, cpu:0>
    %9 = mo.custom(%8) {symbol = "rotate", parameters = {dtype = #mo.dtype<f16>}, device = #mo.device<cpu:0>} : (!mo.tensor<[n - 1, 4], f32, cpu:0>) -> !mo.tensor<[n * 2], f32, cpu:0>
    mo.output(%8, %9) : (!mo.tensor<[n - 1, 4], f32, cpu:0>, !mo.tensor<[n * 2], f32, cpu:0>) -> ()
  }
}
