builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 40], f32, cpu:0>, %m: !mo.tensor<[2, 900], f32, cpu:0>, %f: !mo.tensor<[2, 3, 2], si32, cpu:0>, %r: !mo.tensor<[n], si32, cpu:0>, %s: !mo.tensor<[n], f32, cpu:0>, %c: !mo.tensor<[1], si32, cpu:0>, %p: !mo.tensor<[2], si64, cpu:0>) -> (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 32], f32, cpu:0>) {
    %wa = mo.constant.external() {name = "wa"} : () -> !mo.tensor<[40, 32], f32, cpu:0>
    %wb = mo.constant.external() {name = "wb"} : () -> !mo.tensor<[40, 32], f32, cpu:0>
    %0 = mok.pack(%wa, %wb) {encoding = "columns"} : (!mo.tensor<[40, 32], f32, cpu:0>, !mo.tensor<[40, 32], f32, cpu:0>) -> !mo.tensor<[2, 2048], f32, cpu:0>
    %1, %2 = mok.project_adapters(%x, %m, %f, %r, %r, %s, %c, %p) {max_rank = 2 : i64, inputs = 40 : i64, sites = [array<i64: 0, 0, 32>, array<i64: 224, 1, 32>]} : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[2, 900], f32, cpu:0>, !mo.tensor<[2, 3, 2], si32, cpu:0>, !mo.tensor<[n], si32, cpu:0>, !mo.tensor<[n], si32, cpu:0>, !mo.tensor<[n], f32, cpu:0>, !mo.tensor<[1], si32, cpu:0>, !mo.tensor<[2], si64, cpu:0>) -> (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], si64, cpu:0>)
    %la, %lb = mok.adapted_products(%x, %0, %1, %2, %m, %s) {encoding = "columns", columns = array<i64: 32, 32>, pairs = array<i64>, streamed = false, dtype = #mo.dtype<f32>, next = array<i64: 352, 576>, next_inputs = 40 : i64} : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[2, 2048], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], si64, cpu:0>, !mo.tensor<[2, 900], f32, cpu:0>, !mo.tensor<[n], f32, cpu:0>) -> (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 32], f32, cpu:0>)
    %wq = mo.constant.external() {name = "wq"} : () -> !mo.tensor<[40, 32], f32, cpu:0>
    %3 = mok.pack(%wq) {encoding = "columns"} : (!mo.tensor<[40, 32], f32, cpu:0>) -> !mo.tensor<[1, 2048], f32, cpu:0>
    %q = mok.packed_matmul(%x, %3) {encoding = "columns", columns = 32 : i64, streamed = false} : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[1, 2048], f32, cpu:0>) -> !mo.tensor<[n, 32], f32, cpu:0>
    %lq = mo.lora.add(%q, %x, %m, %f, %r, %r, %s, %c, %p) {max_rank = 2 : i64, inputs = 40 : i64, site = 2 : i64, offset = 448 : i64} : (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[2, 900], f32, cpu:0>, !mo.tensor<[2, 3, 2], si32, cpu:0>, !mo.tensor<[n], si32, cpu:0>, !mo.tensor<[n], si32, cpu:0>, !mo.tensor<[n], f32, cpu:0>, !mo.tensor<[1], si32, cpu:0>, !mo.tensor<[2], si64, cpu:0>) -> !mo.tensor<[n, 32], f32, cpu:0>
    mo.output(%la, %lb, %lq, %q) : (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 32], f32, cpu:0>) -> ()
  }
}
