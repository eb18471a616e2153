builtin.module {
  mo.subgraph @branches_body_0_then_0(%0: !mo.tensor<[n, 4], f32, cpu:0>, %1: !mo.tensor<[n, 4], f32, cpu:0>) -> (!mo.tensor<[n, 4], f32, cpu:0>) {
    %2 = mo.add(%0, %1) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    mo.output(%2) : (!mo.tensor<[n, 4], f32, cpu:0>) -> ()
  }
  mo.subgraph @branches_body_0_else_0(%0: !mo.tensor<[n, 4], f32, cpu:0>, %1: !mo.tensor<[n, 4], f32, cpu:0>) -> (!mo.tensor<[n, 4], f32, cpu:0>) {
    mo.output(%0) : (!mo.tensor<[n, 4], f32, cpu:0>) -> ()
  }
  mo.subgraph @branches_condition_0(%0: !mo.tensor<[], si64, cpu:0>, %1: !mo.tensor<[n, 4], f32, cpu:0>, %2: !mo.buffer<[pages, 4], f32, cpu:0>, %3: !mo.tensor<[n, 4], f32, cpu:0>, %4: !mo.tensor<[], bool, cpu:0>, %5: !mo.chain) -> (!mo.tensor<[], bool, cpu:0>, !mo.chain) {
    %6 = mo.constant() {value = #mo.dense<si64, [], [3]>} : () -> !mo.tensor<[], si64, cpu:0>
    %7 = mo.greater(%6, %0) : (!mo.tensor<[], si64, cpu:0>, !mo.tensor<[], si64, cpu:0>) -> !mo.tensor<[], bool, cpu:0>
    mo.output(%7, %5) : (!mo.tensor<[], bool, cpu:0>, !mo.chain) -> ()
  }
  mo.subgraph @branches_body_0(%0: !mo.tensor<[], si64, cpu:0>, %1: !mo.tensor<[n, 4], f32, cpu:0>, %2: !mo.buffer<[pages, 4], f32, cpu:0>, %3: !mo.tensor<[n, 4], f32, cpu:0>, %4: !mo.tensor<[], bool, cpu:0>, %5: !mo.chain) -> (!mo.tensor<[], si64, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>, !mo.chain) {
    %6, %7 = mo.buffer_load(%2, %5) : (!mo.buffer<[pages, 4], f32, cpu:0>, !mo.chain) -> (!mo.tensor<[pages, 4], f32, cpu:0>, !mo.chain)
    %8 = mo.constant() {value = #mo.dense<f32, [], [1.0]>} : () -> !mo.tensor<[], f32, cpu:0>
    %9 = mo.broadcast_to(%8) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[pages, 4], f32, cpu:0>
    %10 = mo.add(%6, %9) : (!mo.tensor<[pages, 4], f32, cpu:0>, !mo.tensor<[pages, 4], f32, cpu:0>) -> !mo.tensor<[pages, 4], f32, cpu:0>
    %11 = mo.buffer_store(%10, %2, %7) : (!mo.tensor<[pages, 4], f32, cpu:0>, !mo.buffer<[pages, 4], f32, cpu:0>, !mo.chain) -> !mo.chain
    %12 = mo.if(%4, %1, %3) {then = @branches_body_0_then_0, otherwise = @branches_body_0_else_0} : (!mo.tensor<[], bool, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    %13 = mo.constant() {value = #mo.dense<si64, [], [1]>} : () -> !mo.tensor<[], si64, cpu:0>
    %14 = mo.add(%0, %13) : (!mo.tensor<[], si64, cpu:0>, !mo.tensor<[], si64, cpu:0>) -> !mo.tensor<[], si64, cpu:0>
    mo.output(%14, %12, %11) : (!mo.tensor<[], si64, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>, !mo.chain) -> ()
  }
  mo.graph @branches(%0: !mo.tensor<[n, 4], f32, cpu:0>, %1: !mo.tensor<[], bool, cpu:0>, %2: !mo.buffer<[pages, 4], f32, cpu:0>) -> (!mo.tensor<[], si64, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) {
    %3 = mo.constant() {value = #mo.dense<si64, [], [0]>} : () -> !mo.tensor<[], si64, cpu:0>
    %4 = mo.chain_create() : () -> !mo.chain
    %5, %6, %7 = mo.while(%3, %0, %2, %0, %1, %4) {condition = @branches_condition_0, body = @branches_body_0} : (!mo.tensor<[], si64, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>, !mo.buffer<[pages, 4], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[], bool, cpu:0>, !mo.chain) -> (!mo.tensor<[], si64, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>, !mo.chain)
    mo.output(%5, %6) : (!mo.tensor<[], si64, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> ()
  }
}
