builtin.module {
  mo.graph @matmul(%0: !mo.tensor<[n, 4], f32, cpu:0>, %1: !mo.tensor<[4, m], f32, cpu:0>) -> (!mo.tensor<[n, m], f32, cpu:0>, !mo.tensor<[n, 1, 2, 2], f32, cpu:0>, !mo.tensor<[m], f32, cpu:0>, !mo.tensor<[4, 4], f32, cpu:0>) {
    %2 = mo.reshape(%0) : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 1, 2, 2], f32, cpu:0>
    %3 = mo.constant() {value = #mo.dense<f32, [1, 2, 2], [1.0, 0.0, 0.0, 1.0]>} : () -> !mo.tensor<[1, 2, 2], f32, cpu:0>
    %4 = mo.broadcast_to(%3) : (!mo.tensor<[1, 2, 2], f32, cpu:0>) -> !mo.tensor<[n, 1, 2, 2], f32, cpu:0>
    %5 = mo.matmul(%2, %4) : (!mo.tensor<[n, 1, 2, 2], f32, cpu:0>, !mo.tensor<[n, 1, 2, 2], f32, cpu:0>) -> !mo.tensor<[n, 1, 2, 2], f32, cpu:0>
    %6 = mo.matmul(%0, %1) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[4, m], f32, cpu:0>) -> !mo.tensor<[n, m], f32, cpu:0>
    %7 = mo.slice(%0) {start = #mo.shape<[0, 0]>, stop = #mo.shape<[1, 4]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[1, 4], f32, cpu:0>
    %8 = mo.reshape(%7) : (!mo.tensor<[1, 4], f32, cpu:0>) -> !mo.tensor<[4], f32, cpu:0>
    %9 = mo.reshape(%8) : (!mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[1, 4], f32, cpu:0>
    %10 = mo.matmul(%9, %1) : (!mo.tensor<[1, 4], f32, cpu:0>, !mo.tensor<[4, m], f32, cpu:0>) -> !mo.tensor<[1, m], f32, cpu:0>
    %11 = mo.reshape(%10) : (!mo.tensor<[1, m], f32, cpu:0>) -> !mo.tensor<[m], f32, cpu:0>
    %12 = mo.slice(%0) {start = #mo.shape<[0, 0]>, stop = #mo.shape<[1, 4]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[1, 4], f32, cpu:0>
    %13 = mo.reshape(%12) : (!mo.tensor<[1, 4], f32, cpu:0>) -> !mo.tensor<[4], f32, cpu:0>
    %14 = mo.slice(%0) {start = #mo.shape<[1, 0]>, stop = #mo.shape<[2, 4]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[1, 4], f32, cpu:0>
    %15 = mo.reshape(%14) : (!mo.tensor<[1, 4], f32, cpu:0>) -> !mo.tensor<[4], f32, cpu:0>
    %16 = mo.reshape(%13) : (!mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[4, 1], f32, cpu:0>
    %17 = mo.broadcast_to(%16) : (!mo.tensor<[4, 1], f32, cpu:0>) -> !mo.tensor<[4, 4], f32, cpu:0>
    %18 = mo.broadcast_to(%15) : (!mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[4, 4], f32, cpu:0>
    %19 = mo.mul(%17, %18) : (!mo.tensor<[4, 4], f32, cpu:0>, !mo.tensor<[4, 4], f32, cpu:0>) -> !mo.tensor<[4, 4], f32, cpu:0>
    mo.output(%6, %5, %11, %19) : (!mo.tensor<[n, m], f32, cpu:0>, !mo.tensor<[n, 1, 2, 2], f32, cpu:0>, !mo.tensor<[m], f32, cpu:0>, !mo.tensor<[4, 4], f32, cpu:0>) -> ()
  }
}
