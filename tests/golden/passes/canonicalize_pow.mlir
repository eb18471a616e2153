builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>) -> (!mo.tensor<[n, 8], f32, cpu:0>) {
    %c = mo.constant() {value = #mo.dense<f32, [], [2.0]>} : () -> !mo.tensor<[], f32, cpu:0>
    %b = mo.broadcast_to(%c) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %y = mo.mul(%x, %x) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    mo.output(%y) : (!mo.tensor<[n, 8], f32, cpu:0>) -> ()
  }
}
