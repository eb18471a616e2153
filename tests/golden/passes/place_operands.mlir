builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>, %y: !mo.tensor<[n, 8], f32, gpu:0>) -> (!mo.tensor<[n, 8], f32, gpu:0>, !mo.tensor<[n, 8], f32, cpu:1>, !mo.tensor<[3], si64, gpu:0>) {
    %c = mo.constant() {value = #mo.dense<si64, [], [3]>} : () -> !mo.tensor<[], si64, cpu:0>
    %z = mo.constant() {value = #mo.dense<si64, [], [0]>} : () -> !mo.tensor<[], si64, cpu:0>
    %o = mo.constant() {value = #mo.dense<si64, [], [1]>} : () -> !mo.tensor<[], si64, cpu:0>
    %a = mok.device_copy(%x) : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, gpu:0>
    %b = mo.add(%a, %y) : (!mo.tensor<[n, 8], f32, gpu:0>, !mo.tensor<[n, 8], f32, gpu:0>) -> !mo.tensor<[n, 8], f32, gpu:0>
    %d = mo.transfer(%x) : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:1>
    %0 = mok.device_copy(%z) : (!mo.tensor<[], si64, cpu:0>) -> !mo.tensor<[], si64, gpu:0>
    %1 = mok.device_copy(%c) : (!mo.tensor<[], si64, cpu:0>) -> !mo.tensor<[], si64, gpu:0>
    %2 = mok.device_copy(%o) : (!mo.tensor<[], si64, cpu:0>) -> !mo.tensor<[], si64, gpu:0>
    %r = mo.range(%0, %1, %2) : (!mo.tensor<[], si64, gpu:0>, !mo.tensor<[], si64, gpu:0>, !mo.tensor<[], si64, gpu:0>) -> !mo.tensor<[3], si64, gpu:0>
    mo.output(%b, %d, %r) : (!mo.tensor<[n, 8], f32, gpu:0>, !mo.tensor<[n, 8], f32, cpu:1>, !mo.tensor<[3], si64, gpu:0>) -> ()
  }
}
