builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 32], f32, cpu:0>, %z: !mo.tensor<[n, 32], f32, cpu:0>) -> (!mo.tensor<[n, 64], f32, cpu:0>, !mo.tensor<[n, 64], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>) {
    %wa = mo.constant.external() {name = "wa"} : () -> !mo.tensor<[32, 64], f32, cpu:0>
    %wb = mo.constant.external() {name = "wb"} : () -> !mo.tensor<[32, 64], f32, cpu:0>
    %wg = mo.constant.external() {name = "wg"} : () -> !mo.tensor<[32, 40], f32, cpu:0>
    %wu = mo.constant.external() {name = "wu"} : () -> !mo.tensor<[32, 40], f32, cpu:0>
    %0 = mok.pack(%wa, %wb, %wg, %wu) {encoding = "columns", pairs = array<i64: 2>} : (!mo.tensor<[32, 64], f32, cpu:0>, !mo.tensor<[32, 64], f32, cpu:0>, !mo.tensor<[32, 40], f32, cpu:0>, !mo.tensor<[32, 40], f32, cpu:0>) -> !mo.tensor<[7, 1024], f32, cpu:0>
    %a, %b, %g, %u = mok.packed_products(%x, %0) {encoding = "columns", columns = array<i64: 64, 64, 40, 40>, pairs = array<i64: 2>, streamed = false} : (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[7, 1024], f32, cpu:0>) -> (!mo.tensor<[n, 64], f32, cpu:0>, !mo.tensor<[n, 64], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>)
    %ws = mo.constant.external() {name = "ws"} : () -> !mo.tensor<[32, 40], f32, cpu:0>
    %1 = mok.pack(%ws) {encoding = "columns"} : (!mo.tensor<[32, 40], f32, cpu:0>) -> !mo.tensor<[2, 1024], f32, cpu:0>
    %s = mok.packed_matmul(%x, %1) {encoding = "columns", columns = 40 : i64, streamed = false} : (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[2, 1024], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
    %wc = mo.constant.external() {name = "wc"} : () -> !mo.tensor<[32, 40], f32, cpu:0>
    %2 = mok.pack(%wc) {encoding = "columns"} : (!mo.tensor<[32, 40], f32, cpu:0>) -> !mo.tensor<[2, 1024], f32, cpu:0>
    %c = mok.packed_matmul(%x, %2) {encoding = "columns", columns = 40 : i64, streamed = false} : (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[2, 1024], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
    %wd = mo.constant.external() {name = "wd"} : () -> !mo.tensor<[32, 40], f32, cpu:0>
    %3 = mok.pack(%wd) {encoding = "columns"} : (!mo.tensor<[32, 40], f32, cpu:0>) -> !mo.tensor<[2, 1024], f32, cpu:0>
    %d = mok.packed_matmul(%x, %3) {encoding = "columns", columns = 40 : i64, streamed = false} : (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[2, 1024], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
    %t = mok.packed_matmul(%z, %1) {encoding = "columns", columns = 40 : i64, streamed = false} : (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[2, 1024], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
    %h = mo.silu(%g) : (!mo.tensor<[n, 40], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
    %p = mo.mul(%h, %u) : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
    %e = mo.sub(%c, %d) : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>) -> !mo.tensor<[n, 40], f32, cpu:0>
    mo.output(%a, %b, %p, %s, %t, %d, %e, %e) : (!mo.tensor<[n, 64], f32, cpu:0>, !mo.tensor<[n, 64], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>) -> ()
  }
}
