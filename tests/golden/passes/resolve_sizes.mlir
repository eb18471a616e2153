builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>) -> (!mo.tensor<[n * 2 - 2, 8], f32, cpu:0>) {
    %a = mo.slice(%x) {start = #mo.shape<[2, 0]>, stop = #mo.shape<[n, 8]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n - 2, 8], f32, cpu:0>
    %b = mo.rebind(%x) {message = ""} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %c = mo.concat(%a, %b) {axis = 0 : i64} : (!mo.tensor<[n - 2, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n * 2 - 2, 8], f32, cpu:0>
    mo.output(%c) : (!mo.tensor<[n * 2 - 2, 8], f32, cpu:0>) -> ()
  }
}
