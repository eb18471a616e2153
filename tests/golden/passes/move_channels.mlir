builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8, h, w], f32, cpu:0>, %w: !mo.tensor<[3, 3, 8, 8], f32, cpu:0>, %v: !mo.tensor<[3, 3, 8, 8], f32, cpu:0>) -> (!mo.tensor<[n, 8, h, w], f32, cpu:0>, !mo.tensor<[n, 8, 1, w], f32, cpu:0>) {
    mok.check() {sides = #mo.shape<[h, 1]>, exact = false, message = "conv: the window is larger than axis 1 of f32[n, h, w, 8] with its padding"} : () -> ()
    mok.check() {sides = #mo.shape<[w, 1]>, exact = false, message = "conv: the window is larger than axis 2 of f32[n, h, w, 8] with its padding"} : () -> ()
    mok.check() {sides = #mo.shape<[17592186044416, h * n * w * 8]>, exact = false, message = "broadcast_to: the number of elements of the result"} : () -> ()
    %b = mo.constant() {value = #mo.dense<f32, [8], [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]>} : () -> !mo.tensor<[8], f32, cpu:0>
    %a = mo.transpose(%x) {perm = array<i64: 0, 2, 3, 1>} : (!mo.tensor<[n, 8, h, w], f32, cpu:0>) -> !mo.tensor<[n, h, w, 8], f32, cpu:0>
    %c = mo.conv(%a, %w) {stride = array<i64: 1, 1>, dilation = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!mo.tensor<[n, h, w, 8], f32, cpu:0>, !mo.tensor<[3, 3, 8, 8], f32, cpu:0>) -> !mo.tensor<[n, h, w, 8], f32, cpu:0>
    %d = mo.transpose(%c) {perm = array<i64: 0, 3, 1, 2>} : (!mo.tensor<[n, h, w, 8], f32, cpu:0>) -> !mo.tensor<[n, 8, h, w], f32, cpu:0>
    %e = mo.constant() {value = #mo.dense<f32, [8, 1, 1], [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]>} : () -> !mo.tensor<[8, 1, 1], f32, cpu:0>
    %f = mo.broadcast_to(%e) : (!mo.tensor<[8, 1, 1], f32, cpu:0>) -> !mo.tensor<[n, 8, h, w], f32, cpu:0>
    %0 = mo.reshape(%e) : (!mo.tensor<[8, 1, 1], f32, cpu:0>) -> !mo.tensor<[1, 1, 1, 8], f32, cpu:0>
    %1 = mo.broadcast_to(%0) : (!mo.tensor<[1, 1, 1, 8], f32, cpu:0>) -> !mo.tensor<[n, h, w, 8], f32, cpu:0>
    %2 = mo.add(%c, %1) : (!mo.tensor<[n, h, w, 8], f32, cpu:0>, !mo.tensor<[n, h, w, 8], f32, cpu:0>) -> !mo.tensor<[n, h, w, 8], f32, cpu:0>
    %g = mo.transpose(%2) {perm = array<i64: 0, 3, 1, 2>} : (!mo.tensor<[n, h, w, 8], f32, cpu:0>) -> !mo.tensor<[n, 8, h, w], f32, cpu:0>
    %i = mo.relu(%2) : (!mo.tensor<[n, h, w, 8], f32, cpu:0>) -> !mo.tensor<[n, h, w, 8], f32, cpu:0>
    %h = mo.transpose(%i) {perm = array<i64: 0, 3, 1, 2>} : (!mo.tensor<[n, h, w, 8], f32, cpu:0>) -> !mo.tensor<[n, 8, h, w], f32, cpu:0>
    %j = mo.conv(%i, %v) {stride = array<i64: 1, 1>, dilation = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, groups = 1 : i64} : (!mo.tensor<[n, h, w, 8], f32, cpu:0>, !mo.tensor<[3, 3, 8, 8], f32, cpu:0>) -> !mo.tensor<[n, h, w, 8], f32, cpu:0>
    %k = mo.transpose(%j) {perm = array<i64: 0, 3, 1, 2>} : (!mo.tensor<[n, h, w, 8], f32, cpu:0>) -> !mo.tensor<[n, 8, h, w], f32, cpu:0>
    %3 = mo.add(%j, %i) : (!mo.tensor<[n, h, w, 8], f32, cpu:0>, !mo.tensor<[n, h, w, 8], f32, cpu:0>) -> !mo.tensor<[n, h, w, 8], f32, cpu:0>
    %l = mo.transpose(%3) {perm = array<i64: 0, 3, 1, 2>} : (!mo.tensor<[n, h, w, 8], f32, cpu:0>) -> !mo.tensor<[n, 8, h, w], f32, cpu:0>
    %4 = mo.reduce_max(%3) {axis = 1 : i64} : (!mo.tensor<[n, h, w, 8], f32, cpu:0>) -> !mo.tensor<[n, 1, w, 8], f32, cpu:0>
    %m = mo.transpose(%4) {perm = array<i64: 0, 3, 1, 2>} : (!mo.tensor<[n, 1, w, 8], f32, cpu:0>) -> !mo.tensor<[n, 8, 1, w], f32, cpu:0>
    mo.output(%l, %m) : (!mo.tensor<[n, 8, h, w], f32, cpu:0>, !mo.tensor<[n, 8, 1, w], f32, cpu:0>) -> ()
  }
}
