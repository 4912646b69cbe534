// Tiles of a depthwise convolution in shared memory: shared by depthwise_tile.cu (floats) and depthwise_dot.cu (dot products of bytes).
// A block loads the input of a tile (RG*TH rows, TW columns, CG channels) by one bulk copy while it computes tiles before; a thread has VEC (2 or 4)
// channels of a band of TH rows and a strip of WIDE columns. Constants: R, S, STRIDE_H, STRIDE_W, TH, RG, TW, WIDE, CG, VEC, STAGES;
// The including file defines IN, the bytes of an input.
constexpr int LANES = CG / VEC, STRIPS = TW / WIDE, USED = LANES * STRIPS * RG, THREADS = (USED + 31) / 32 * 32;
constexpr int ROWS = (RG * TH - 1) * STRIDE_H + R, COLUMNS = (TW - 1) * STRIDE_W + S, TILE_BYTES = ROWS * COLUMNS * CG * IN;
constexpr int SLOT = (TILE_BYTES + 127) / 128 * 128;
constexpr int SPAN = (WIDE - 1) * STRIDE_W + S, OWN_ROWS = (TH - 1) * STRIDE_H + R;
constexpr int SUMS = (R + STRIDE_H - 1) / STRIDE_H, TURN = SUMS * STRIDE_H;  // output rows in the making; input rows until they repeat

// Start of a channel group's tile: columns, rows, image.
struct Place {
    int x, y, n;
    template <class A> DEV Place(const A& a, int tile) { const int line = tile / a.tiles_w; x = (tile - line * a.tiles_w) * TW; n = line / a.tiles_h; y = (line - n * a.tiles_h) * (TH * RG); }
};

// The slots of shared memory and the tiles that this block puts through them.
struct Tiles {
    u32 base, bars;
    int first, stride, channel0;
    template <class A> DEV Tiles(const A& a, const u8* raw) {
        base = (shared_address(raw) + 127) & ~127u;
        bars = base + STAGES * SLOT;
        first = blockIdx.x / a.groups;
        stride = gridDim.x / a.groups;
        channel0 = blockIdx.x % a.groups * CG;
    }
    DEV void prepare(const TensorMap* in) const {
        if (threadIdx.x == 0) {
            map_prefetch(in);
            for (int i = 0; i < STAGES; ++i) barrier_init(bars + 8 * i, 1);
            barrier_init_fence();
        }
    }
    template <class A> DEV void ask(const A& a, int tile, int slot) const {
        const Place at(a, tile);
        barrier_expect(bars + 8 * slot, TILE_BYTES);
        load_box4(base + slot * SLOT, &a.input, bars + 8 * slot, channel0, at.x * STRIDE_W - a.pad_w, at.y * STRIDE_H - a.pad_h, at.n);
    }
    template <class A> DEV void begin(const A& a) const {
        if (threadIdx.x == 0)
            for (int i = 0; i < STAGES - 1; ++i) if (first + i * stride < a.tiles) ask(a, first + i * stride, i);
    }
    // Asks for the tile that is STAGES - 1 after this one, into the slot that was computed last.
    template <class A> DEV void ask_later(const A& a, int tile, int slot) const {
        const int later = tile + (STAGES - 1) * stride;
        if (threadIdx.x == 0 && later < a.tiles) ask(a, later, STAGES == 1 ? 0 : slot == 0 ? STAGES - 1 : slot - 1);
    }
};
