builtin.module {
  mo.graph @shape(%0: !mo.tensor<[n, 4], f32, cpu:0>, %1: !mo.tensor<[1, m], f32, cpu:0>) -> (!mo.tensor<[2, m + n * 2], f32, cpu:0>, !mo.tensor<[n - 1, 7], f32, cpu:0>, !mo.tensor<[n, 3], f32, cpu:0>, !mo.tensor<[n], si64, cpu:0>, !mo.tensor<[k, 4], f32, cpu:0>) {
    %2 = mo.reshape(%0) : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 2, 2], f32, cpu:0>
    %3 = mo.transpose(%2) {perm = array<i64: 1, 0, 2>} : (!mo.tensor<[n, 2, 2], f32, cpu:0>) -> !mo.tensor<[2, n, 2], f32, cpu:0>
    %4 = mo.reshape(%3) : (!mo.tensor<[2, n, 2], f32, cpu:0>) -> !mo.tensor<[2, n * 2], f32, cpu:0>
    %5 = mo.reshape(%1) : (!mo.tensor<[1, m], f32, cpu:0>) -> !mo.tensor<[1, 1, 1, m], f32, cpu:0>
    %6 = mo.broadcast_to(%5) : (!mo.tensor<[1, 1, 1, m], f32, cpu:0>) -> !mo.tensor<[2, 1, 1, m], f32, cpu:0>
    %7 = mo.reshape(%6) : (!mo.tensor<[2, 1, 1, m], f32, cpu:0>) -> !mo.tensor<[2, m], f32, cpu:0>
    %8 = mo.concat(%4, %7) {axis = 1 : i64} : (!mo.tensor<[2, n * 2], f32, cpu:0>, !mo.tensor<[2, m], f32, cpu:0>) -> !mo.tensor<[2, m + n * 2], f32, cpu:0>
    %9 = mo.slice(%0) {start = #mo.shape<[1, 3]>, stop = #mo.shape<[n, -1]>, step = #mo.shape<[1, -1]>} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n - 1, 4], f32, cpu:0>
    %10 = mo.pad(%9) {low = #mo.shape<[0, 1]>, high = #mo.shape<[0, 2]>, mode = "constant", value = -1.000000e+00 : f64} : (!mo.tensor<[n - 1, 4], f32, cpu:0>) -> !mo.tensor<[n - 1, 7], f32, cpu:0>
    %11 = mo.constant() {value = #mo.dense<si64, [], [0]>} : () -> !mo.tensor<[], si64, cpu:0>
    %12 = mo.shape_to_tensor() {shape = #mo.shape<[n]>} : () -> !mo.tensor<[1], si64, cpu:0>
    %13 = mo.reshape(%12) : (!mo.tensor<[1], si64, cpu:0>) -> !mo.tensor<[], si64, cpu:0>
    %14 = mo.constant() {value = #mo.dense<si64, [], [1]>} : () -> !mo.tensor<[], si64, cpu:0>
    %15 = mo.range(%11, %13, %14) : (!mo.tensor<[], si64, cpu:0>, !mo.tensor<[], si64, cpu:0>, !mo.tensor<[], si64, cpu:0>) -> !mo.tensor<[n], si64, cpu:0>
    %16 = mo.slice(%0) {start = #mo.shape<[0, 0]>, stop = #mo.shape<[n, 1]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 1], f32, cpu:0>
    %17 = mo.slice(%0) {start = #mo.shape<[0, 1]>, stop = #mo.shape<[n, 4]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[n, 3], f32, cpu:0>
    %18 = mo.rebind(%0) {message = "rows"} : (!mo.tensor<[n, 4], f32, cpu:0>) -> !mo.tensor<[k, 4], f32, cpu:0>
    mo.output(%8, %10, %17, %15, %18) : (!mo.tensor<[2, m + n * 2], f32, cpu:0>, !mo.tensor<[n - 1, 7], f32, cpu:0>, !mo.tensor<[n, 3], f32, cpu:0>, !mo.tensor<[n], si64, cpu:0>, !mo.tensor<[k, 4], f32, cpu:0>) -> ()
  }
}
