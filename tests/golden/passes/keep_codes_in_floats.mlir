builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 8], f32, cpu:0>) -> (!mo.tensor<[n, 8], f32, cpu:0>) {
    %s = mo.constant() {value = #mo.dense<f32, [], [3.0]>} : () -> !mo.tensor<[], f32, cpu:0>
    %l = mo.constant() {value = #mo.dense<f32, [], [0.0]>} : () -> !mo.tensor<[], f32, cpu:0>
    %h = mo.constant() {value = #mo.dense<f32, [], [255.0]>} : () -> !mo.tensor<[], f32, cpu:0>
    %sb = mo.broadcast_to(%s) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %lb = mo.broadcast_to(%l) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %hb = mo.broadcast_to(%h) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
    %y = mok.region(%x) {kind = "map"} : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0> {
    ^bb0(%0: !mo.tensor<[n, 8], f32, cpu:0>):
      %r = mo.round(%0) : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %s_1 = mo.constant() {value = #mo.dense<f32, [], [3.0]>} : () -> !mo.tensor<[], f32, cpu:0>
      %sb_1 = mo.broadcast_to(%s_1) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %a = mo.add(%r, %sb_1) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %1 = mo.constant() {value = #mo.dense<f32, [], [0.0]>} : () -> !mo.tensor<[], f32, cpu:0>
      %2 = mo.broadcast_to(%1) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %3 = mo.greater(%a, %2) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], bool, cpu:0>
      %4 = mo.constant() {value = #mo.dense<f32, [], [0.0]>} : () -> !mo.tensor<[], f32, cpu:0>
      %5 = mo.broadcast_to(%4) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %6 = mo.select(%3, %a, %5) : (!mo.tensor<[n, 8], bool, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %7 = mo.constant() {value = #mo.dense<f32, [], [255.0]>} : () -> !mo.tensor<[], f32, cpu:0>
      %8 = mo.broadcast_to(%7) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %9 = mo.greater(%8, %6) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], bool, cpu:0>
      %10 = mo.constant() {value = #mo.dense<f32, [], [255.0]>} : () -> !mo.tensor<[], f32, cpu:0>
      %11 = mo.broadcast_to(%10) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %12 = mo.select(%9, %6, %11) : (!mo.tensor<[n, 8], bool, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %13 = mo.abs(%a) : (!mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %14 = mo.constant() {value = #mo.dense<f32, [], [0.0]>} : () -> !mo.tensor<[], f32, cpu:0>
      %15 = mo.broadcast_to(%14) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %16 = mo.greater(%13, %15) : (!mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], bool, cpu:0>
      %17 = mo.constant() {value = #mo.dense<f32, [], [0.0]>} : () -> !mo.tensor<[], f32, cpu:0>
      %18 = mo.broadcast_to(%17) : (!mo.tensor<[], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      %y_1 = mo.select(%16, %12, %18) : (!mo.tensor<[n, 8], bool, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>, !mo.tensor<[n, 8], f32, cpu:0>) -> !mo.tensor<[n, 8], f32, cpu:0>
      mok.yield(%y_1) : (!mo.tensor<[n, 8], f32, cpu:0>) -> ()
    }
    mo.output(%y) : (!mo.tensor<[n, 8], f32, cpu:0>) -> ()
  }
}
