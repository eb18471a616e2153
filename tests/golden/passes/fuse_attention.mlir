builtin.module {
  mo.graph @g(%x: !mo.tensor<[b, n, 64], f32, cpu:0>, %m: !mo.tensor<[b, 1, 1, n], f32, cpu:0>) -> (!mo.tensor<[b, n, 32], f32, cpu:0>) {
    mok.check() {sides = #mo.shape<[17592186044416, b * n * 32]>, exact = false, message = "slice: the number of elements of the result"} : () -> ()
    mok.check() {sides = #mo.shape<[17592186044416, b * n * n * 4]>, exact = false, message = "matmul: the number of elements of the result"} : () -> ()
    %h = mo.reshape(%x) : (!mo.tensor<[b, n, 64], f32, cpu:0>) -> !mo.tensor<[b, n, 8, 8], f32, cpu:0>
    %q = mo.slice(%h) {start = #mo.shape<[0, 0, 0, 0]>, stop = #mo.shape<[b, n, 4, 8]>, step = #mo.shape<[1, 1, 1, 1]>} : (!mo.tensor<[b, n, 8, 8], f32, cpu:0>) -> !mo.tensor<[b, n, 4, 8], f32, cpu:0>
    %k = mo.slice(%h) {start = #mo.shape<[0, 0, 4, 0]>, stop = #mo.shape<[b, n, 6, 8]>, step = #mo.shape<[1, 1, 1, 1]>} : (!mo.tensor<[b, n, 8, 8], f32, cpu:0>) -> !mo.tensor<[b, n, 2, 8], f32, cpu:0>
    %v = mo.slice(%h) {start = #mo.shape<[0, 0, 6, 0]>, stop = #mo.shape<[b, n, 8, 8]>, step = #mo.shape<[1, 1, 1, 1]>} : (!mo.tensor<[b, n, 8, 8], f32, cpu:0>) -> !mo.tensor<[b, n, 2, 8], f32, cpu:0>
    %k1 = mo.reshape(%k) : (!mo.tensor<[b, n, 2, 8], f32, cpu:0>) -> !mo.tensor<[b, n, 2, 1, 8], f32, cpu:0>
    %k2 = mo.broadcast_to(%k1) : (!mo.tensor<[b, n, 2, 1, 8], f32, cpu:0>) -> !mo.tensor<[b, n, 2, 2, 8], f32, cpu:0>
    %v1 = mo.reshape(%v) : (!mo.tensor<[b, n, 2, 8], f32, cpu:0>) -> !mo.tensor<[b, n, 2, 1, 8], f32, cpu:0>
    %v2 = mo.broadcast_to(%v1) : (!mo.tensor<[b, n, 2, 1, 8], f32, cpu:0>) -> !mo.tensor<[b, n, 2, 2, 8], f32, cpu:0>
    %qt = mo.transpose(%q) {perm = array<i64: 0, 2, 1, 3>} : (!mo.tensor<[b, n, 4, 8], f32, cpu:0>) -> !mo.tensor<[b, 4, n, 8], f32, cpu:0>
    %0 = mo.transpose(%k2) {perm = array<i64: 0, 2, 3, 1, 4>} : (!mo.tensor<[b, n, 2, 2, 8], f32, cpu:0>) -> !mo.tensor<[b, 2, 2, n, 8], f32, cpu:0>
    %1 = mo.transpose(%v2) {perm = array<i64: 0, 2, 3, 1, 4>} : (!mo.tensor<[b, n, 2, 2, 8], f32, cpu:0>) -> !mo.tensor<[b, 2, 2, n, 8], f32, cpu:0>
    %2 = mo.reshape(%m) : (!mo.tensor<[b, 1, 1, n], f32, cpu:0>) -> !mo.tensor<[b, 1, 1, 1, n], f32, cpu:0>
    %3 = mo.reshape(%qt) : (!mo.tensor<[b, 4, n, 8], f32, cpu:0>) -> !mo.tensor<[b, 2, 2, n, 8], f32, cpu:0>
    %4 = mok.attention(%3, %0, %1, %2) {scale = 5.000000e-01 : f64, fills = [unit], roundings = [unit, unit, unit], axis = 1 : i64, dtype = #mo.dtype<f32>} : (!mo.tensor<[b, 2, 2, n, 8], f32, cpu:0>, !mo.tensor<[b, 2, 2, n, 8], f32, cpu:0>, !mo.tensor<[b, 2, 2, n, 8], f32, cpu:0>, !mo.tensor<[b, 1, 1, 1, n], f32, cpu:0>) -> !mo.tensor<[b, n, 2, 2, 8], f32, cpu:0>
    %5 = mo.transpose(%4) {perm = array<i64: 0, 2, 3, 1, 4>} : (!mo.tensor<[b, n, 2, 2, 8], f32, cpu:0>) -> !mo.tensor<[b, 2, 2, n, 8], f32, cpu:0>
    %o = mo.reshape(%5) : (!mo.tensor<[b, 2, 2, n, 8], f32, cpu:0>) -> !mo.tensor<[b, 4, n, 8], f32, cpu:0>
    %ot = mo.transpose(%o) {perm = array<i64: 0, 2, 1, 3>} : (!mo.tensor<[b, 4, n, 8], f32, cpu:0>) -> !mo.tensor<[b, n, 4, 8], f32, cpu:0>
    %y = mo.reshape(%ot) : (!mo.tensor<[b, n, 4, 8], f32, cpu:0>) -> !mo.tensor<[b, n, 32], f32, cpu:0>
    mo.output(%y) : (!mo.tensor<[b, n, 32], f32, cpu:0>) -> ()
  }
}
