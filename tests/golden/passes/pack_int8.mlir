builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 40], si8, cpu:0>, %v: !mo.tensor<[64, 40], si8, cpu:0>) -> (!mo.tensor<[n, 64], si32, cpu:0>, !mo.tensor<[n, 64], si32, cpu:0>, !mo.tensor<[n, 64], si32, cpu:0>, !mo.tensor<[n, 64], si8, cpu:0>) {
    %a = mo.constant.external() {name = "a"} : () -> !mo.tensor<[64, 40], si8, cpu:0>
    %b = mo.constant.external() {name = "b"} : () -> !mo.tensor<[40, 64], si8, cpu:0>
    %p = mo.cast(%x) : (!mo.tensor<[n, 40], si8, cpu:0>) -> !mo.tensor<[n, 40], si32, cpu:0>
    %s = mo.cast(%v) : (!mo.tensor<[64, 40], si8, cpu:0>) -> !mo.tensor<[64, 40], si32, cpu:0>
    %0 = mok.pack(%a) {encoding = "int8 rows"} : (!mo.tensor<[64, 40], si8, cpu:0>) -> !mo.tensor<[2, 2048], ui8, cpu:0>
    %y = mok.packed_matmul(%x, %0) {encoding = "int8 rows", columns = 64 : i64, streamed = false} : (!mo.tensor<[n, 40], si8, cpu:0>, !mo.tensor<[2, 2048], ui8, cpu:0>) -> !mo.tensor<[n, 64], si32, cpu:0>
    %1 = mok.pack(%b) {encoding = "int8 columns"} : (!mo.tensor<[40, 64], si8, cpu:0>) -> !mo.tensor<[2, 2048], ui8, cpu:0>
    %z = mok.packed_matmul(%x, %1) {encoding = "int8 columns", columns = 64 : i64, streamed = false} : (!mo.tensor<[n, 40], si8, cpu:0>, !mo.tensor<[2, 2048], ui8, cpu:0>) -> !mo.tensor<[n, 64], si32, cpu:0>
    %u = mok.matmul(%p, %s) {transpose_b = true} : (!mo.tensor<[n, 40], si32, cpu:0>, !mo.tensor<[64, 40], si32, cpu:0>) -> !mo.tensor<[n, 64], si32, cpu:0>
    %2 = mok.packed_matmul(%x, %1) {encoding = "int8 columns", columns = 64 : i64, streamed = false} : (!mo.tensor<[n, 40], si8, cpu:0>, !mo.tensor<[2, 2048], ui8, cpu:0>) -> !mo.tensor<[n, 64], si32, cpu:0>
    %t = mo.cast(%2) : (!mo.tensor<[n, 64], si32, cpu:0>) -> !mo.tensor<[n, 64], si8, cpu:0>
    mo.output(%y, %z, %u, %t) : (!mo.tensor<[n, 64], si32, cpu:0>, !mo.tensor<[n, 64], si32, cpu:0>, !mo.tensor<[n, 64], si32, cpu:0>, !mo.tensor<[n, 64], si8, cpu:0>) -> ()
  }
}
