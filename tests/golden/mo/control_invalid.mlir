// expected: call: the module has no subgraph @f
mo.graph @g() {
  mo.call() {callee = @f, prefix = ""} : () -> ()
  mo.output() : () -> ()
}
// -----
// expected: call: @f takes 1 values (f32[n]), got 0 ()
mo.subgraph @f(%0: !mo.tensor<[n], f32, cpu:0>) { mo.output() : () -> () }
mo.graph @g() {
  mo.call() {callee = @f, prefix = ""} : () -> ()
  mo.output() : () -> ()
}
// -----
// expected: call: axis 0 of input 1 of @f is n * 2, here m * 2, got m
mo.subgraph @f(%0: !mo.tensor<[n], f32, cpu:0>, %1: !mo.tensor<[n * 2], f32, cpu:0>) { mo.output() : () -> () }
mo.graph @g(%0: !mo.tensor<[m], f32, cpu:0>) {
  mo.call(%0, %0) {callee = @f, prefix = ""} : (!mo.tensor<[m], f32, cpu:0>, !mo.tensor<[m], f32, cpu:0>) -> ()
  mo.output() : () -> ()
}
// -----
// expected: call: input 0 of @f is buffer f32[n], got f32[n]
mo.subgraph @f(%0: !mo.buffer<[n], f32, cpu:0>) { mo.output() : () -> () }
mo.graph @g(%0: !mo.tensor<[n], f32, cpu:0>) {
  mo.call(%0) {callee = @f, prefix = ""} : (!mo.tensor<[n], f32, cpu:0>) -> ()
  mo.output() : () -> ()
}
// -----
// expected: the result types are f32[n], @f gives f32[m]
mo.subgraph @f(%0: !mo.tensor<[n], f32, cpu:0>) { mo.output(%0) : (!mo.tensor<[n], f32, cpu:0>) -> () }
mo.graph @g(%0: !mo.tensor<[m], f32, cpu:0>) {
  %1 = mo.call(%0) {callee = @f, prefix = ""} : (!mo.tensor<[m], f32, cpu:0>) -> !mo.tensor<[n], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: custom f: expected a chain among both operands and results, or in neither
mo.graph @g() {
  %0 = mo.chain_create() : () -> !mo.chain
  mo.custom(%0) {symbol = "f", parameters = {}} : (!mo.chain) -> ()
  mo.output() : () -> ()
}
// -----
// expected: custom f: a chain must be the last operand and the last result
mo.graph @g(%0: !mo.tensor<[3], f32, cpu:0>) {
  %1 = mo.chain_create() : () -> !mo.chain
  %2 = mo.custom(%1, %0) {symbol = "f", parameters = {}} : (!mo.chain, !mo.tensor<[3], f32, cpu:0>) -> !mo.chain
  mo.output() : () -> ()
}
// -----
// expected: custom f: a result cannot be a buffer
mo.graph @g() {
  %0 = mo.custom() {symbol = "f", parameters = {}} : () -> !mo.buffer<[3], f32, cpu:0>
  mo.output() : () -> ()
}
// -----
// expected: custom: the name of the op is empty
mo.graph @g() {
  mo.custom() {symbol = "", parameters = {}} : () -> ()
  mo.output() : () -> ()
}
// -----
// expected: a chain must be the last input
mo.graph @g(%0: !mo.chain, %1: !mo.tensor<[3], f32, cpu:0>) {
  mo.output() : () -> ()
}
// -----
// expected: output: a chain must be the last value
mo.subgraph @f(%0: !mo.tensor<[3], f32, cpu:0>, %1: !mo.chain) {
  mo.output(%1, %0) : (!mo.chain, !mo.tensor<[3], f32, cpu:0>) -> ()
}
mo.graph @g() { mo.output() : () -> () }
