builtin.module {
  mo.graph @gather(%0: !mo.tensor<[n, 4], f32, cpu:0>, %1: !mo.tensor<[m], si64, cpu:0>) -> (!mo.tensor<[m, 4], f32, cpu:0>, !mo.tensor<[m], f32, cpu:0>, !mo.tensor<[rest], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) {
    %2 = mo.gather(%0, %1) {axis = 0 : i64} : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[m], si64, cpu:0>) -> !mo.tensor<[m, 4], f32, cpu:0>
    %3 = mo.reshape(%1) : (!mo.tensor<[m], si64, cpu:0>) -> !mo.tensor<[m, 1], si64, cpu:0>
    %4 = mo.reshape(%1) : (!mo.tensor<[m], si64, cpu:0>) -> !mo.tensor<[m, 1], si64, cpu:0>
    %5 = mo.concat(%3, %4) {axis = 1 : i64} : (!mo.tensor<[m, 1], si64, cpu:0>, !mo.tensor<[m, 1], si64, cpu:0>) -> !mo.tensor<[m, 2], si64, cpu:0>
    %6 = mo.gather_nd(%0, %5) {batch_dims = 0 : i64} : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[m, 2], si64, cpu:0>) -> !mo.tensor<[m], f32, cpu:0>
    %7 = mo.slice(%1) {start = #mo.shape<[0]>, stop = #mo.shape<[1]>, step = #mo.shape<[1]>} : (!mo.tensor<[m], si64, cpu:0>) -> !mo.tensor<[1], si64, cpu:0>
    %8 = mo.reshape(%7) : (!mo.tensor<[1], si64, cpu:0>) -> !mo.tensor<[], si64, cpu:0>
    %9 = mo.reshape(%8) : (!mo.tensor<[], si64, cpu:0>) -> !mo.tensor<[1], si64, cpu:0>
    %10 = mo.constant() {value = #mo.dense<si64, [1], [1]>} : () -> !mo.tensor<[1], si64, cpu:0>
    %11 = mo.concat(%9, %10) {axis = 0 : i64} : (!mo.tensor<[1], si64, cpu:0>, !mo.tensor<[1], si64, cpu:0>) -> !mo.tensor<[2], si64, cpu:0>
    %12 = mo.shape_to_tensor() {shape = #mo.shape<[n, 2]>} : () -> !mo.tensor<[2], si64, cpu:0>
    %13 = mo.constant() {value = #mo.dense<si64, [2], [1, 1]>} : () -> !mo.tensor<[2], si64, cpu:0>
    %14 = mo.slice_dynamic(%0, %11, %12, %13) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[2], si64, cpu:0>, !mo.tensor<[2], si64, cpu:0>, !mo.tensor<[2], si64, cpu:0>) -> !mo.tensor<[rest, 1], f32, cpu:0>
    %15 = mo.reshape(%14) : (!mo.tensor<[rest, 1], f32, cpu:0>) -> !mo.tensor<[rest], f32, cpu:0>
    %16 = mo.reshape(%1) : (!mo.tensor<[m], si64, cpu:0>) -> !mo.tensor<[m, 1], si64, cpu:0>
    %17 = mo.scatter_nd(%0, %2, %16) : (!mo.tensor<[n, 4], f32, cpu:0>, !mo.tensor<[m, 4], f32, cpu:0>, !mo.tensor<[m, 1], si64, cpu:0>) -> !mo.tensor<[n, 4], f32, cpu:0>
    mo.output(%2, %6, %15, %17) : (!mo.tensor<[m, 4], f32, cpu:0>, !mo.tensor<[m], f32, cpu:0>, !mo.tensor<[rest], f32, cpu:0>, !mo.tensor<[n, 4], f32, cpu:0>) -> ()
  }
}
