builtin.module {
  mo.graph @elementwise(%0: !mo.tensor<[n, 4], f32, cpu:0>, %1: !mo.tensor<[4], f32, cpu:0>) -> (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], bf16, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) {
    %2 = mo.silu(%0) : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %3 = mo.broadcast_to(%1) : (!mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %4 = mo.mul(%2, %3) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %5 = mo.constant() {value = #mo.dense<f32, [], [1.0]>} : () -> !mo.tensor<[], f32, cpu:0>
    %6 = mo.broadcast_to(%5) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %7 = mo.add(%4, %6) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %8 = mo.broadcast_to(%1) : (!mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %9 = mo.greater(%0, %8) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], bool, cpu:0>
    %10 = mo.gelu(%7) {approximate = "tanh"} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %11 = mo.neg(%0) : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %12 = mo.select(%9, %10, %11) : (!mo.tensor<[n, 4], bool, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %13 = mo.cast(%0) : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], bf16, cpu:0>
    %14 = mo.constant() {value = #mo.dense<bf16, [], [3.0]>} : () -> !mo.tensor<[], bf16, cpu:0>
    %15 = mo.broadcast_to(%14) : (!mo.tensor<[], bf16, cpu:0>) -> !mo.tensor<[n, 4], bf16, cpu:0>
    %16 = mo.div(%13, %15) : (!mo.tensor<[n, 4], bf16, cpu:0>, !mo.tensor<[n, 4], bf16, cpu:0>) -> !mo.tensor<[n, 4], bf16, cpu:0>
    %17 = mo.broadcast_to(%1) : (!mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %18 = mo.floor_div(%0, %17) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    mo.output(%12, %16, %18) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], bf16, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> ()
  }
}
