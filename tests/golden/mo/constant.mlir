builtin.module {
  mo.graph @constant(%0: !mo.tensor<[n, 4], f32, cpu:0>) -> (!mo.tensor<[n, 100], f32, cpu:0>, !mo.tensor<[3], f32, cpu:0>, !mo.tensor<[], bool, cpu:0>, !mo.tensor<[n, 4], f32, gpu:0>) {
    %1 = mo.constant() {value = #mo.resource<"constant_0">} : () -> !mo.tensor<[4, 100], f32, cpu:0>
    %2 = mo.constant.external() {name = "w", align = 64 : i64} : () -> !mo.tensor<[4, 4], f32, cpu:0>
    %3 = mo.matmul(%0, %2) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[4, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %4 = mo.matmul(%3, %1) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[4, 100], f32, cpu:0>) -> !mo.tensor<[n, 100], f32, cpu:0>
    %5 = mo.constant() {value = #mo.dense<f32, [3], ["0x7fc00000", -0.0, 0.1]>} : () -> !mo.tensor<[3], f32, cpu:0>
    %6 = mo.constant() {value = #mo.dense<bool, [], [true]>} : () -> !mo.tensor<[], bool, cpu:0>
    %7 = mo.transfer(%0) : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, gpu:0>
    mo.output(%4, %5, %6, %7) : (!mo.tensor<[n, 100], f32, cpu:0>, !mo.tensor<[3], f32, cpu:0>, !mo.tensor<[], bool, cpu:0>, !mo.tensor<[n, 4], f32, gpu:0>) -> ()
  }
}
