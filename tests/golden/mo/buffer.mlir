builtin.module {
  mo.graph @buffer(%0: !mo.tensor<[n, 4], f32, cpu:0>, %1: !mo.buffer<[pages, 4], f32, cpu:0>) -> (!mo.tensor<[4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) {
    %2 = mo.slice(%0) {start = #mo.shape<[0, 0]>, stop = #mo.shape<[2, 4]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[2, 4], f32, cpu:0>
    %3 = mo.constant() {value = #mo.dense<f32, [], [2.0]>} : () -> !mo.tensor<[], f32, cpu:0>
    %4 = mo.broadcast_to(%3) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[2, 4], f32, cpu:0>
    %5 = mo.mul(%2, %4) : (!mo.tensor<[2, 4], f32, cpu:0>, !mo.tensor<[2, 4], f32, cpu:0>) -> !mo.tensor<[2, 4], f32, cpu:0>
    %6 = mo.chain_create() : () -> !mo.chain
    %7 = mo.buffer_store_slice(%5, %1, %6) {start = #mo.shape<[1, 0]>, stop = #mo.shape<[3, 4]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[2, 4], f32, cpu:0>, !mo.buffer<[pages, 4], f32, cpu:0>, !mo.chain) -> !mo.chain
    %8 = mo.buffer_create() : () -> !mo.buffer<[n, 4], f32, cpu:0>
    %9 = mo.buffer_store(%0, %8, %7) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.buffer<[n, 4], f32, cpu:0>, !mo.chain) -> !mo.chain
    %10, %11 = mo.buffer_load(%1, %9) : (!mo.buffer<[pages, 4], f32, cpu:0>, !mo.chain) -> (!mo.tensor<[pages, 4], f32, cpu:0>, !mo.chain)
    %12 = mo.slice(%10) {start = #mo.shape<[0, 0]>, stop = #mo.shape<[1, 4]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[pages, 4], f32, cpu:0>) -> !mo.tensor<[1, 4], f32, cpu:0>
    %13 = mo.reshape(%12) : (!mo.tensor<[1, 4], f32, cpu:0>) -> !mo.tensor<[4], f32, cpu:0>
    %14, %15 = mo.buffer_load(%8, %11) : (!mo.buffer<[n, 4], f32, cpu:0>, !mo.chain) -> (!mo.tensor<[n, 4], f32, cpu:0>, !mo.chain)
    mo.output(%13, %14) : (!mo.tensor<[4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> ()
  }
}
