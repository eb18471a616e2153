builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 40], f32, cpu:0>, %m: !mo.tensor<[2, 900], f32, cpu:0>, %f: !mo.tensor<[2, 3, 2], si32, cpu:0>, %r: !mo.tensor<[n], si32, cpu:0>, %s: !mo.tensor<[n], f32, cpu:0>, %c: !mo.tensor<[1], si32, cpu:0>, %p: !mo.tensor<[2], si64, cpu:0>) -> (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 32], f32, cpu:0>) {
    %wa = mo.constant.external() {name = "wa"} : () -> !mo.tensor<[40, 32], f32, cpu:0>
    %0 = mok.pack(%wa) {encoding = "columns"} : (!mo.tensor<[40, 32], f32, cpu:0>) -> !mo.tensor<[1, 2048], f32, cpu:0>
    %la = mok.adapted_matmul(%x, %0, %m, %f, %r, %r, %s, %c, %p) {encoding = "columns", columns = 32 : i64, streamed = false, dtype = #mo.dtype<f32>, max_rank = 2 : i64, site = array<i64: 0, 0>} : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[1, 2048], f32, cpu:0>, !mo.tensor<[2, 900], f32, cpu:0>, !mo.tensor<[2, 3, 2], si32, cpu:0>, !mo.tensor<[n], si32, cpu:0>, !mo.tensor<[n], si32, cpu:0>, !mo.tensor<[n], f32, cpu:0>, !mo.tensor<[1], si32, cpu:0>, !mo.tensor<[2], si64, cpu:0>) -> !mo.tensor<[n, 32], f32, cpu:0>
    %wb = mo.constant.external() {name = "wb"} : () -> !mo.tensor<[40, 32], f32, cpu:0>
    %1 = mok.pack(%wb) {encoding = "columns"} : (!mo.tensor<[40, 32], f32, cpu:0>) -> !mo.tensor<[1, 2048], f32, cpu:0>
    %lb = mok.adapted_matmul(%x, %1, %m, %f, %r, %r, %s, %c, %p) {encoding = "columns", columns = 32 : i64, streamed = false, dtype = #mo.dtype<f32>, max_rank = 2 : i64, site = array<i64: 224, 1>} : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[1, 2048], f32, cpu:0>, !mo.tensor<[2, 900], f32, cpu:0>, !mo.tensor<[2, 3, 2], si32, cpu:0>, !mo.tensor<[n], si32, cpu:0>, !mo.tensor<[n], si32, cpu:0>, !mo.tensor<[n], f32, cpu:0>, !mo.tensor<[1], si32, cpu:0>, !mo.tensor<[2], si64, cpu:0>) -> !mo.tensor<[n, 32], f32, cpu:0>
    %wq = mo.constant.external() {name = "wq"} : () -> !mo.tensor<[40, 32], f32, cpu:0>
    %2 = mok.pack(%wq) {encoding = "columns"} : (!mo.tensor<[40, 32], f32, cpu:0>) -> !mo.tensor<[1, 2048], f32, cpu:0>
    %q = mok.packed_matmul(%x, %2) {encoding = "columns", columns = 32 : i64, streamed = false} : (!mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[1, 2048], f32, cpu:0>) -> !mo.tensor<[n, 32], f32, cpu:0>
    %lq = mo.lora.add(%q, %x, %m, %f, %r, %r, %s, %c, %p) {max_rank = 2 : i64, inputs = 40 : i64, site = 2 : i64, offset = 448 : i64} : (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 40], f32, cpu:0>, !mo.tensor<[2, 900], f32, cpu:0>, !mo.tensor<[2, 3, 2], si32, cpu:0>, !mo.tensor<[n], si32, cpu:0>, !mo.tensor<[n], si32, cpu:0>, !mo.tensor<[n], f32, cpu:0>, !mo.tensor<[1], si32, cpu:0>, !mo.tensor<[2], si64, cpu:0>) -> !mo.tensor<[n, 32], f32, cpu:0>
    mo.output(%la, %lb, %lq, %q) : (!mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 32], f32, cpu:0>, !mo.tensor<[n, 32], f32, cpu:0>) -> ()
  }
}
