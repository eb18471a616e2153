builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>, %v: !mo.tensor<[8], f32, cpu:0>) -> (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) {
    %l = mo.slice(%x) {start = #mo.shape<[0, 0]>, stop = #mo.shape<[n, 4]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %r = mo.slice(%x) {start = #mo.shape<[0, 4]>, stop = #mo.shape<[n, 8]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %n = mo.neg(%r) : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %b = mo.broadcast_to(%v) : (!mo.tensor<[8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %0 = mo.slice(%x) {start = #mo.shape<[0, 0]>, stop = #mo.shape<[n, 4]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %1 = mo.slice(%x) {start = #mo.shape<[0, 0]>, stop = #mo.shape<[n, 4]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %2 = mo.mul(%0, %1) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %3 = mo.slice(%v) {start = #mo.shape<[0]>, stop = #mo.shape<[4]>, step = #mo.shape<[1]>} : (!mo.tensor<[8], f32, cpu:0>) -> !mo.tensor<[4], f32, cpu:0>
    %4 = mo.broadcast_to(%3) : (!mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %5 = mo.mul(%n, %4) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %6 = mo.add(%2, %5) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %7 = mo.slice(%x) {start = #mo.shape<[0, 4]>, stop = #mo.shape<[n, 8]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %8 = mo.slice(%x) {start = #mo.shape<[0, 4]>, stop = #mo.shape<[n, 8]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %9 = mo.mul(%7, %8) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %10 = mo.slice(%v) {start = #mo.shape<[4]>, stop = #mo.shape<[8]>, step = #mo.shape<[1]>} : (!mo.tensor<[8], f32, cpu:0>) -> !mo.tensor<[4], f32, cpu:0>
    %11 = mo.broadcast_to(%10) : (!mo.tensor<[4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %12 = mo.mul(%l, %11) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %13 = mo.add(%9, %12) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %y = mo.concat(%6, %13) {axis = 1 : i64} : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %k = mo.concat(%l, %n) {axis = 1 : i64} : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %e = mo.exp(%k) : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %z = mo.softmax(%e) {axis = 1 : i64} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    mo.output(%y, %z) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> ()
  }
}
