builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>, %y: !mo.tensor<[m, 8], f32, cpu:0>) -> (!mo.tensor<[n - 2, 8], f32, cpu:0>, !mo.tensor<[1, 8], f32, cpu:0>, !mo.tensor<[2, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) {
    mok.check() {sides = #mo.shape<[n, 2]>, exact = false, message = "slice: axis 0 of the result has size n - 2, which must not be negative"} : () -> ()
    mok.check() {sides = #mo.shape<[n, 1]>, exact = false, message = "max: axis 0 of f32[n, 8] is empty"} : () -> ()
    mok.check() {sides = #mo.shape<[m, n]>, exact = true, message = "rebind: axis 0 of f32[m, 8] to f32[n, 8] (as long as x)"} : () -> ()
    %a = mo.slice(%x) {start = #mo.shape<[2, 0]>, stop = #mo.shape<[n, 8]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n - 2, 8], f32, cpu:0>
    %b = mo.reduce_max(%x) {axis = 0 : i64} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[1, 8], f32, cpu:0>
    %c = mo.slice(%x) {start = #mo.shape<[n - 2, 0]>, stop = #mo.shape<[n, 8]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[2, 8], f32, cpu:0>
    %d = mo.rebind(%y) {message = "as long as x"} : (!mo.tensor<[m, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    mo.output(%a, %b, %c, %d) : (!mo.tensor<[n - 2, 8], f32, cpu:0>, !mo.tensor<[1, 8], f32, cpu:0>, !mo.tensor<[2, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> ()
  }
}
