builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 32], f32, cpu:0>, %z: !mo.tensor<[n, 40], f32, cpu:0>) -> (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>) {
    %wa = mo.constant.external() {name = "wa"} : () -> !mo.tensor<[32, 40], f32, cpu:0>
    %wc = mo.constant.external() {name = "wc"} : () -> !mo.tensor<[32, 40], f32, cpu:0>
    %wg = mo.constant.external() {name = "wg"} : () -> !mo.tensor<[32, 40], f32, cpu:0>
    %wu = mo.constant.external() {name = "wu"} : () -> !mo.tensor<[32, 40], f32, cpu:0>
    %wb = mo.constant.external() {name = "wb"} : () -> !mo.tensor<[32, 40], f32, cpu:0>
    %0, %1 = mok.once(%wa, %wc, %wg, %wu, %wb) : (!mo.tensor<[32, 40], f32, cpu:0>, !mo.tensor<[32, 40], f32, cpu:0>, !mo.tensor<[32, 40], f32, cpu:0>, !mo.tensor<[32, 40], f32, cpu:0>, !mo.tensor<[32, 40], f32, cpu:0>) -> (!mo.tensor<[7, 1024], f32, cpu:0>, !mo.tensor<[2, 1024], f32, cpu:0>) {
    ^bb0(%2: !mo.tensor<[32, 40], f32, cpu:0>, %3: !mo.tensor<[32, 40], f32, cpu:0>, %4: !mo.tensor<[32, 40], f32, cpu:0>, %5: !mo.tensor<[32, 40], f32, cpu:0>, %6: !mo.tensor<[32, 40], f32, cpu:0>):
      %7 = mok.pack(%2, %3, %4, %5) {encoding = "columns", pairs = array<i64: 2>} : (!mo.tensor<[32, 40], f32, cpu:0>, !mo.tensor<[32, 40], f32, cpu:0>, !mo.tensor<[32, 40], f32, cpu:0>, !mo.tensor<[32, 40], f32, cpu:0>) -> !mo.tensor<[7, 1024], f32, cpu:0>
      %8 = mok.pack(%6) {encoding = "columns"} : (!mo.tensor<[32, 40], f32, cpu:0>) -> !mo.tensor<[2, 1024], f32, cpu:0>
      mok.yield(%7, %8) : (!mo.tensor<[7, 1024], f32, cpu:0>, !mo.tensor<[2, 1024], f32, cpu:0>) -> ()
    }
    %c, %i, %p = mok.region(%x, %0, %z) {kind = "library"} : (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[7, 1024], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>) -> (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>) {
    ^bb0(%2: !mo.tensor<[n, 32], f32, cpu:0>, %3: !mo.tensor<[7, 1024], f32, cpu:0>, %4: !mo.tensor<[n, 40], f32, cpu:0>):
      %a, %c_1, %g, %u = mok.packed_products(%2, %3) {encoding = "columns", columns = array<i64: 40, 40, 40, 40>, pairs = array<i64: 2>, streamed = false} : (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[7, 1024], f32, cpu:0>) -> (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>)
      %n = mo.neg(%a) : (!mo.tensor<[n, 40], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
      %i_1 = mo.add(%n, %4) : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
      %h = mo.silu(%g) : (!mo.tensor<[n, 40], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
      %p_1 = mo.mul(%h, %u) : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
      mok.yield(%c_1, %i_1, %p_1) : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>) -> ()
    }
    %j = mo.cumsum(%i) {axis = 1 : i64, exclusive = false, reverse = false} : (!mo.tensor<[n, 40], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
    %k = mok.region(%x, %1, %j) {kind = "library"} : (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[2, 1024], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0> {
    ^bb0(%2: !mo.tensor<[n, 32], f32, cpu:0>, %3: !mo.tensor<[2, 1024], f32, cpu:0>, %4: !mo.tensor<[n, 40], f32, cpu:0>):
      %b = mok.packed_matmul(%2, %3) {encoding = "columns", columns = 40 : i64, streamed = false} : (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[2, 1024], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
      %k_1 = mo.mul(%b, %4) : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
      mok.yield(%k_1) : (!mo.tensor<[n, 40], f32, cpu:0>) -> ()
    }
    mo.output(%i, %k, %c, %p) : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>) -> ()
  }
}
