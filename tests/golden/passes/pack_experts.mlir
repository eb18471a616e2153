builtin.module {
  mo.graph @g(%x: !mo.tensor<[n, 48], f32, cpu:0>, %z: !mo.tensor<[n, 48], f32, cpu:0>, %v: !mo.tensor<[3, 48, 48], f32, cpu:0>, %s: !mo.tensor<[4], ui32, cpu:0>, %i: !mo.tensor<[3], si32, cpu:0>, %t: !mo.tensor<[2], ui32, cpu:0>) -> (!mo.tensor<[n, 48], f32, cpu:0>, !mo.tensor<[n, 48], f32, cpu:0>, !mo.tensor<[n, 48], f32, cpu:0>, !mo.tensor<[n, 48], f32, cpu:0>) {
    %wa = mo.constant.external() {name = "wa"} : () -> !mo.tensor<[3, 48, 48], f32, cpu:0>
    %wb = mo.constant.external() {name = "wb"} : () -> !mo.tensor<[3, 48, 48], f32, cpu:0>
    %wc = mo.constant.external() {name = "wc"} : () -> !mo.tensor<[3, 48, 48], f32, cpu:0>
    %we = mo.constant.external() {name = "we"} : () -> !mo.tensor<[3, 48, 48], f32, cpu:0>
    %0 = mo.reshape(%wa) : (!mo.tensor<[3, 48, 48], f32, cpu:0>) -> !mo.tensor<[144, 48], f32, cpu:0>
    %1 = mo.reshape(%wb) : (!mo.tensor<[3, 48, 48], f32, cpu:0>) -> !mo.tensor<[144, 48], f32, cpu:0>
    %2 = mok.pack(%0, %1) {encoding = "rows", pairs = array<i64: 0>} : (!mo.tensor<[144, 48], f32, cpu:0>, !mo.tensor<[144, 48], f32, cpu:0>) -> !mo.tensor<[9, 2048], f32, cpu:0>
    %a, %b = mok.grouped_products(%x, %2, %s, %i, %t) {encoding = "rows", columns = array<i64: 48, 48>, pairs = array<i64: 0>, streamed = false, dtype = #mo.dtype<f32>} : (!mo.tensor<[n, 48], f32, cpu:0>, !mo.tensor<[9, 2048], f32, cpu:0>, !mo.tensor<[4], ui32, cpu:0>, !mo.tensor<[3], si32, cpu:0>, !mo.tensor<[2], ui32, cpu:0>) -> (!mo.tensor<[n, 48], f32, cpu:0>, !mo.tensor<[n, 48], f32, cpu:0>)
    %g = mo.mul(%a, %b) : (!mo.tensor<[n, 48], f32, cpu:0>, !mo.tensor<[n, 48], f32, cpu:0>) -> !mo.tensor<[n, 48], f32, cpu:0>
    %3 = mo.reshape(%wc) : (!mo.tensor<[3, 48, 48], f32, cpu:0>) -> !mo.tensor<[144, 48], f32, cpu:0>
    %4 = mo.slice(%3) {start = #mo.shape<[0, 0]>, stop = #mo.shape<[48, 48]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[144, 48], f32, cpu:0>) -> !mo.tensor<[48, 48], f32, cpu:0>
    %5 = mo.slice(%3) {start = #mo.shape<[48, 0]>, stop = #mo.shape<[96, 48]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[144, 48], f32, cpu:0>) -> !mo.tensor<[48, 48], f32, cpu:0>
    %6 = mo.slice(%3) {start = #mo.shape<[96, 0]>, stop = #mo.shape<[144, 48]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[144, 48], f32, cpu:0>) -> !mo.tensor<[48, 48], f32, cpu:0>
    %7 = mok.pack(%4, %5, %6) {encoding = "rows"} : (!mo.tensor<[48, 48], f32, cpu:0>, !mo.tensor<[48, 48], f32, cpu:0>, !mo.tensor<[48, 48], f32, cpu:0>) -> !mo.tensor<[6, 2048], f32, cpu:0>
    %c = mok.grouped_products(%g, %7, %s, %i, %t) {encoding = "rows", columns = array<i64: 48>, pairs = array<i64>, streamed = false, dtype = #mo.dtype<f32>} : (!mo.tensor<[n, 48], f32, cpu:0>, !mo.tensor<[6, 2048], f32, cpu:0>, !mo.tensor<[4], ui32, cpu:0>, !mo.tensor<[3], si32, cpu:0>, !mo.tensor<[2], ui32, cpu:0>) -> !mo.tensor<[n, 48], f32, cpu:0>
    %8 = mo.reshape(%we) : (!mo.tensor<[3, 48, 48], f32, cpu:0>) -> !mo.tensor<[144, 48], f32, cpu:0>
    %9 = mo.slice(%8) {start = #mo.shape<[0, 0]>, stop = #mo.shape<[48, 48]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[144, 48], f32, cpu:0>) -> !mo.tensor<[48, 48], f32, cpu:0>
    %10 = mo.slice(%8) {start = #mo.shape<[48, 0]>, stop = #mo.shape<[96, 48]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[144, 48], f32, cpu:0>) -> !mo.tensor<[48, 48], f32, cpu:0>
    %11 = mo.slice(%8) {start = #mo.shape<[96, 0]>, stop = #mo.shape<[144, 48]>, step = #mo.shape<[1, 1]>} : (!mo.tensor<[144, 48], f32, cpu:0>) -> !mo.tensor<[48, 48], f32, cpu:0>
    %12 = mok.pack(%9, %10, %11) {encoding = "rows"} : (!mo.tensor<[48, 48], f32, cpu:0>, !mo.tensor<[48, 48], f32, cpu:0>, !mo.tensor<[48, 48], f32, cpu:0>) -> !mo.tensor<[6, 2048], f32, cpu:0>
    %e = mok.grouped_products(%g, %12, %s, %i, %t) {encoding = "rows", columns = array<i64: 48>, pairs = array<i64>, streamed = false, dtype = #mo.dtype<f32>} : (!mo.tensor<[n, 48], f32, cpu:0>, !mo.tensor<[6, 2048], f32, cpu:0>, !mo.tensor<[4], ui32, cpu:0>, !mo.tensor<[3], si32, cpu:0>, !mo.tensor<[2], ui32, cpu:0>) -> !mo.tensor<[n, 48], f32, cpu:0>
    %h = mo.mul(%c, %e) : (!mo.tensor<[n, 48], f32, cpu:0>, !mo.tensor<[n, 48], f32, cpu:0>) -> !mo.tensor<[n, 48], f32, cpu:0>
    %f = mok.grouped_products(%z, %7, %s, %i, %t) {encoding = "rows", columns = array<i64: 48>, pairs = array<i64>, streamed = false, dtype = #mo.dtype<f32>} : (!mo.tensor<[n, 48], f32, cpu:0>, !mo.tensor<[6, 2048], f32, cpu:0>, !mo.tensor<[4], ui32, cpu:0>, !mo.tensor<[3], si32, cpu:0>, !mo.tensor<[2], ui32, cpu:0>) -> !mo.tensor<[n, 48], f32, cpu:0>
    %d = mo.grouped_matmul.ragged(%z, %v, %s, %i, %t) : (!mo.tensor<[n, 48], f32, cpu:0>, !mo.tensor<[3, 48, 48], f32, cpu:0>, !mo.tensor<[4], ui32, cpu:0>, !mo.tensor<[3], si32, cpu:0>, !mo.tensor<[2], ui32, cpu:0>) -> !mo.tensor<[n, 48], f32, cpu:0>
    mo.output(%g, %h, %f, %d) : (!mo.tensor<[n, 48], f32, cpu:0>, !mo.tensor<[n, 48], f32, cpu:0>, !mo.tensor<[n, 48], f32, cpu:0>, !mo.tensor<[n, 48], f32, cpu:0>) -> ()
  }
}
