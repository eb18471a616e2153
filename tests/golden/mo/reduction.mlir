builtin.module {
  mo.graph @reduction(%0: !mo.tensor<[n, 4], f32, cpu:0>) -> (!mo.tensor<[1, 4], f32, cpu:0>, !mo.tensor<[n, 1], f32, cpu:0>, !mo.tensor<[n, 1], f32, cpu:0>, !mo.tensor<[n, 1], si64, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 2], f32, cpu:0>, !mo.tensor<[n, 2], si64, cpu:0>) {
    %1 = mo.reduce_sum(%0) {axis = 0 : i64} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[1, 4], f32, cpu:0>
    %2 = mo.reduce_mean(%0) {axis = 1 : i64} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 1], f32, cpu:0>
    %3 = mo.reduce_max(%0) {axis = 1 : i64} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 1], f32, cpu:0>
    %4 = mo.argmax(%0) {axis = 1 : i64} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 1], si64, cpu:0>
    %5 = mo.cumsum(%0) {axis = 1 : i64, exclusive = false, reverse = true} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %6 = mo.softmax(%0) {axis = 1 : i64} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %7 = mo.logsoftmax(%0) {axis = 0 : i64} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %8, %9 = mo.top_k(%0) {k = 2 : i64, axis = 1 : i64} : (!mo.tensor<[n, 4], f32, cpu:0>) -> (!mo.tensor<[n, 2], f32, cpu:0>, !mo.tensor<[n, 2], si64, cpu:0>)
    mo.output(%1, %2, %3, %4, %5, %6, %7, %8, %9) : (!mo.tensor<[1, 4], f32, cpu:0>, !mo.tensor<[n, 1], f32, cpu:0>, !mo.tensor<[n, 1], f32, cpu:0>, !mo.tensor<[n, 1], si64, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 2], f32, cpu:0>, !mo.tensor<[n, 2], si64, cpu:0>) -> ()
  }
}
