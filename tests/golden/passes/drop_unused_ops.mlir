builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>) -> (!mo.tensor<[n, 8], f32, cpu:0>) {
    %b = mo.neg(%x) : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    mo.output(%b) : (!mo.tensor<[n, 8], f32, cpu:0>) -> ()
  }
}
