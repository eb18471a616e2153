builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 64], bf16, cpu:0>, %y: !mo.tensor<[n, 48], bf16, cpu:0>) -> (!mo.tensor<[n, 64], bf16, cpu:0>, !mo.tensor<[n, 64], bf16, cpu:0>, !mo.tensor<[n, 64], bf16, cpu:0>, !mo.tensor<[n, 64], bf16, cpu:0>) {
    %w = mo.constant.external() {name = "w"} : () -> !mo.tensor<[64, 64], bf16, cpu:0>
    %pw = mok.pack(%w) {encoding = "rows"} : (!mo.tensor<[64, 64], bf16, cpu:0>) -> !mo.tensor<[2, 2048], bf16, cpu:0>
    %0 = mok.code(%pw) {encoding = "coded bfloat16"} : (!mo.tensor<[2, 2048], bf16, cpu:0>) -> !mo.tensor<[2, 4160], ui8, cpu:0>
    %v = mo.constant.external() {name = "v"} : () -> !mo.tensor<[64, 48], bf16, cpu:0>
    %pv = mok.pack(%v) {encoding = "rows"} : (!mo.tensor<[64, 48], bf16, cpu:0>) -> !mo.tensor<[2, 2048], bf16, cpu:0>
    %u = mo.constant.external() {name = "u"} : () -> !mo.tensor<[64, 64], bf16, cpu:0>
    %pu = mok.pack(%u) {encoding = "rows"} : (!mo.tensor<[64, 64], bf16, cpu:0>) -> !mo.tensor<[2, 2048], bf16, cpu:0>
    %a = mok.packed_matmul(%x, %0) {encoding = "coded bfloat16", columns = 64 : i64, streamed = true} : (!mo.tensor<[n, 64], bf16, cpu:0>, !mo.tensor<[2, 4160], ui8, cpu:0>) -> !mo.tensor<[n, 64], bf16, cpu:0>
    %b = mok.packed_matmul(%a, %0) {encoding = "coded bfloat16", columns = 64 : i64, streamed = true} : (!mo.tensor<[n, 64], bf16, cpu:0>, !mo.tensor<[2, 4160], ui8, cpu:0>) -> !mo.tensor<[n, 64], bf16, cpu:0>
    %c = mok.packed_matmul(%y, %pv) {encoding = "rows", columns = 64 : i64, streamed = true} : (!mo.tensor<[n, 48], bf16, cpu:0>, !mo.tensor<[2, 2048], bf16, cpu:0>) -> !mo.tensor<[n, 64], bf16, cpu:0>
    %d = mok.packed_matmul(%x, %pu) {encoding = "rows", columns = 64 : i64, streamed = false} : (!mo.tensor<[n, 64], bf16, cpu:0>, !mo.tensor<[2, 2048], bf16, cpu:0>) -> !mo.tensor<[n, 64], bf16, cpu:0>
    mo.output(%a, %b, %c, %d) : (!mo.tensor<[n, 64], bf16, cpu:0>, !mo.tensor<[n, 64], bf16, cpu:0>, !mo.tensor<[n, 64], bf16, cpu:0>, !mo.tensor<[n, 64], bf16, cpu:0>) -> ()
  }
}
