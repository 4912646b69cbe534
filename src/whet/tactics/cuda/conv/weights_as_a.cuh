// Shared parts of integer convolutions with weights as operand A in registers: a row of the accumulators is a channel, a column a pixel.
// A thread has two adjacent channels and pairs of adjacent pixels; bytes are transposed to channels last on the way to shared memory.
// Constants: BN, KC (32: operand A holds two result rows; 64), TO, ACT, FOLD; WIDE (pixels of a stored row).
constexpr int THREADS = 128, SIDE = 64 / KC;                       // result rows in operand A
constexpr int PARTS = KC / 16, STAGE = SIDE * WIDE * KC;           // 16-byte parts of a pixel's channels; bytes stored at once
static_assert(BN % 16 == 0 && (KC == 32 || KC == 64), "sizes");

// This thread's part of every fragment of the weights.
template <int STEPS> DEV void load_weights(u32 (&weights)[STEPS][4], const uint4* from) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
        const uint4 v = from[s * THREADS + threadIdx.x];
        weights[s][0] = v.x; weights[s][1] = v.y; weights[s][2] = v.z; weights[s][3] = v.w;
    }
}

// Index of a pixel's part of 16 channels in the staging buffer, in an order without bank conflicts.
DEV u32 place_of(int row, int pixel, int part) { return (row * WIDE + pixel) * KC + ((part ^ (PARTS == 4 ? pixel >> 1 & 3 : pixel >> 2 & 1)) << 4); }

// Words of 8 x 8 halves, a half two channels of a pixel: lane l has the row of l / 4, halves 2 (l % 4) and the next; lane j gives where column j goes.
DEV void store_turned(u32 address, u32 word) { asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(word) : "memory"); }

template <class ARGS, int N> DEV void finish(float (&v)[N], const ARGS& a) {
    if (FOLD) {
        float late[N];
#pragma unroll
        for (int e = 0; e < N; ++e) late[e] = a.act.b;
        fold<ACT>(v, a.act, late);
        return;
    }
#pragma unroll
    for (int e = 0; e < N; ++e) v[e] = activate<ACT>(v[e], a.act) * a.per_step + a.zero;
}
template <class ARGS> DEV u32 four(float a, float b, float c, float d, const ARGS& p) { return FOLD ? steps_of(a, b, c, d, p.per_step, p.zero) : bytes_of<TO>(a, b, c, d); }

// Stores `stage` to row y from column x on, and to the next row if there are two.
template <class ARGS> DEV void send(const ARGS& a, const u8* stage, int n, int y, int x) {
    for (int i = threadIdx.x; i < SIDE * WIDE * PARTS; i += THREADS) {
        const int part = i % PARTS, pixel = i / PARTS % WIDE, row = i / PARTS / WIDE;
        if (y + row < a.store_p && x + pixel < a.store_q)
            *reinterpret_cast<uint4*>(a.out + (((long long)n * a.store_p + y + row) * a.store_q + x + pixel) * KC + part * 16) =
                *reinterpret_cast<const uint4*>(stage + place_of(row, pixel, part));
    }
}
