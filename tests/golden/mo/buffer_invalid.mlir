// expected: buffer_load: operand 0 is f32[3], expected a buffer
mo.graph @g(%0: !mo.tensor<[3], f32, cpu:0>) {
  %1 = mo.chain_create() : () -> !mo.chain
  %2, %3 = mo.buffer_load(%0, %1) : (!mo.tensor<[3], f32, cpu:0>, !mo.chain) -> (!mo.tensor<[3], f32, cpu:0>, !mo.chain)
  mo.output() : () -> ()
}
// -----
// expected: buffer_store: the source is f32[4], the buffer holds f32[3]
mo.graph @g(%0: !mo.tensor<[4], f32, cpu:0>, %1: !mo.buffer<[3], f32, cpu:0>) {
  %2 = mo.chain_create() : () -> !mo.chain
  %3 = mo.buffer_store(%0, %1, %2) : (!mo.tensor<[4], f32, cpu:0>, !mo.buffer<[3], f32, cpu:0>, !mo.chain) -> !mo.chain
  mo.output() : () -> ()
}
// -----
// expected: takes 3 operands, got 2
mo.graph @g(%0: !mo.tensor<[3], f32, cpu:0>, %1: !mo.buffer<[3], f32, cpu:0>) {
  %2 = mo.buffer_store(%0, %1) : (!mo.tensor<[3], f32, cpu:0>, !mo.buffer<[3], f32, cpu:0>) -> !mo.chain
  mo.output() : () -> ()
}
// -----
// expected: buffer_store_slice: the slice has shape [2], not [3]
mo.graph @g(%0: !mo.tensor<[3], f32, cpu:0>, %1: !mo.buffer<[3], f32, cpu:0>) {
  %2 = mo.chain_create() : () -> !mo.chain
  %3 = mo.buffer_store_slice(%0, %1, %2) {start = #mo.shape<[0]>, stop = #mo.shape<[2]>, step = #mo.shape<[1]>} : (!mo.tensor<[3], f32, cpu:0>, !mo.buffer<[3], f32, cpu:0>, !mo.chain) -> !mo.chain
  mo.output() : () -> ()
}
