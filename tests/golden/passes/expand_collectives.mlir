builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], bf16, cpu:0>, %y: !mo.tensor<[n, 8], bf16, cpu:1>, %s: !mo.buffer<[4], ui8, cpu:0>, %t: !mo.buffer<[4], ui8, cpu:1>) -> (!mo.tensor<[n * 2, 8], bf16, cpu:0>, !mo.tensor<[n * 2, 8], bf16, cpu:1>) {
    %c = mo.chain_create() : () -> !mo.chain
    %0 = mo.transfer(%y) : (!mo.tensor<[n, 8], bf16, cpu:1>) -> !mo.tensor<[n, 8], bf16, cpu:0>
    %1 = mo.cast(%x) : (!mo.tensor<[n, 8], bf16, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %2 = mo.cast(%0) : (!mo.tensor<[n, 8], bf16, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %3 = mo.add(%1, %2) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %a = mo.cast(%3) : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], bf16, cpu:0>
    %b = mo.transfer(%a) : (!mo.tensor<[n, 8], bf16, cpu:0>) -> !mo.tensor<[n, 8], bf16, cpu:1>
    %4 = mo.transfer(%b) : (!mo.tensor<[n, 8], bf16, cpu:1>) -> !mo.tensor<[n, 8], bf16, cpu:0>
    %e = mo.concat(%a, %4) {axis = 0 : i64} : (!mo.tensor<[n, 8], bf16, cpu:0>, !mo.tensor<[n, 8], bf16, cpu:0>) -> !mo.tensor<[n * 2, 8], bf16, cpu:0>
    %f = mo.transfer(%e) : (!mo.tensor<[n * 2, 8], bf16, cpu:0>) -> !mo.tensor<[n * 2, 8], bf16, cpu:1>
    mo.output(%e, %f) : (!mo.tensor<[n * 2, 8], bf16, cpu:0>, !mo.tensor<[n * 2, 8], bf16, cpu:1>) -> ()
  }
}
