builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, h, w, 8], f32, cpu:0>) -> (!mo.tensor<[n, h, w, 8], f32, cpu:0>, !mo.tensor<[n, 2, 4, h, w], f32, cpu:0>) {
    %a = mo.transpose(%x) {perm = array<i64: 0, 3, 1, 2>} : (!mo.tensor<[n, h, w, 8], f32, cpu:0>) -> !mo.tensor<[n, 8, h, w], f32, cpu:0>
    %0 = mo.reshape(%x) : (!mo.tensor<[n, h, w, 8], f32, cpu:0>) -> !mo.tensor<[n, h * w, 8], f32, cpu:0>
    %b = mo.transpose(%0) {perm = array<i64: 0, 2, 1>} : (!mo.tensor<[n, h * w, 8], f32, cpu:0>) -> !mo.tensor<[n, 8, h * w], f32, cpu:0>
    %1 = mo.relu(%0) : (!mo.tensor<[n, h * w, 8], f32, cpu:0>) -> !mo.tensor<[n, h * w, 8], f32, cpu:0>
    %c = mo.transpose(%1) {perm = array<i64: 0, 2, 1>} : (!mo.tensor<[n, h * w, 8], f32, cpu:0>) -> !mo.tensor<[n, 8, h * w], f32, cpu:0>
    %e = mo.reshape(%1) : (!mo.tensor<[n, h * w, 8], f32, cpu:0>) -> !mo.tensor<[n, h, w, 8], f32, cpu:0>
    %d = mo.transpose(%e) {perm = array<i64: 0, 3, 1, 2>} : (!mo.tensor<[n, h, w, 8], f32, cpu:0>) -> !mo.tensor<[n, 8, h, w], f32, cpu:0>
    %f = mo.reshape(%c) : (!mo.tensor<[n, 8, h * w], f32, cpu:0>) -> !mo.tensor<[n, 2, 4, h, w], f32, cpu:0>
    mo.output(%e, %f) : (!mo.tensor<[n, h, w, 8], f32, cpu:0>, !mo.tensor<[n, 2, 4, h, w], f32, cpu:0>) -> ()
  }
}
