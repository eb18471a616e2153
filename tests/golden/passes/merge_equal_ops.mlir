builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>) -> (!mo.tensor<[n, 8], f32, cpu:0>) {
    %a = mo.exp(%x) : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %c = mo.softmax(%a) {axis = 1 : i64} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %d = mo.softmax(%a) {axis = 0 : i64} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %y = mo.add(%c, %d) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    mo.output(%y) : (!mo.tensor<[n, 8], f32, cpu:0>) -> ()
  }
}
