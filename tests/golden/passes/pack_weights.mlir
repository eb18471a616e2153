builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 256], f32, cpu:0>, %v: !mo.tensor<[20, 144], ui8, cpu:0>) -> (!mo.tensor<[n, 20], f32, cpu:0>, !mo.tensor<[n, 20], f32, cpu:0>, !mo.tensor<[n, 20], f32, cpu:0>) {
    %w = mo.constant.external() {name = "w"} : () -> !mo.tensor<[20, 144], ui8, cpu:0>
    %0 = mok.pack(%w) {encoding = "Q4_K"} : (!mo.tensor<[20, 144], ui8, cpu:0>) -> !mo.tensor<[1, 4736], ui8, cpu:0>
    %y = mok.packed_matmul(%x, %0) {encoding = "Q4_K", columns = 20 : i64, streamed = false} : (!mo.tensor<[n, 256], f32, cpu:0>, !mo.tensor<[1, 4736], ui8, cpu:0>) -> !mo.tensor<[n, 20], f32, cpu:0>
    %z = mo.qmatmul(%x, %v) {encoding = "Q4_K"} : (!mo.tensor<[n, 256], f32, cpu:0>, !mo.tensor<[20, 144], ui8, cpu:0>) -> !mo.tensor<[n, 20], f32, cpu:0>
    %n = mo.neg(%x) : (!mo.tensor<[n, 256], f32, cpu:0>) -> !mo.tensor<[n, 256], f32, cpu:0>
    %u = mok.packed_matmul(%n, %0) {encoding = "Q4_K", columns = 20 : i64, streamed = false} : (!mo.tensor<[n, 256], f32, cpu:0>, !mo.tensor<[1, 4736], ui8, cpu:0>) -> !mo.tensor<[n, 20], f32, cpu:0>
    mo.output(%y, %z, %u) : (!mo.tensor<[n, 20], f32, cpu:0>, !mo.tensor<[n, 20], f32, cpu:0>, !mo.tensor<[n, 20], f32, cpu:0>) -> ()
  }
}
