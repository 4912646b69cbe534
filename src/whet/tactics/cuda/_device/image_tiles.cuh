// Tiles of an image's results, and where in the piece of the image that a tile reads a result's window begins: for kernels that read every tap as fragments.
// Included after Args, which counts an image's tiles by tiles_h and tiles_w. Constants: TW (results of a tile's row), STRIDE_H, STRIDE_W, COLUMNS (pixels of
// the piece's row), PIXEL (bytes).
struct Tile {  // which results; steps to the block's next tile by addition
    int tx, ty, n;
    DEV Tile(const Args& a, int tile) { const int line = tile / a.tiles_w; tx = tile - line * a.tiles_w; n = line / a.tiles_h; ty = line - n * a.tiles_h; }
    DEV void add(const Args& a, const Tile& step) {
        tx += step.tx; ty += step.ty; n += step.n;
        if (tx >= a.tiles_w) { tx -= a.tiles_w; ++ty; }
        if (ty >= a.tiles_h) { ty -= a.tiles_h; ++n; }
    }
};

// Bytes in front of the window of the tile's result m.
DEV int window_of(int m) { return ((m / TW * STRIDE_H) * COLUMNS + m % TW * STRIDE_W) * PIXEL; }
