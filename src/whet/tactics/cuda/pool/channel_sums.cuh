// One value per channel from the partial sums of its PARTS threads (`mine`), finished by `end`; for blocks with ROWS rows of threads and GC channels.
// Every thread calls it.
template <typename End> DEV void by_channel(float (&accumulators)[ROWS][GC], float mine, float (&to)[GC], int t, End end) {
    if (t < PARTS * GC) accumulators[t / GC][t % GC] = mine;
    __syncthreads();
    if (t < GC) {
        float total = 0.f;
#pragma unroll
        for (int q = 0; q < PARTS; ++q) total += accumulators[q][t];
        to[t] = end(total);
    }
    __syncthreads();
}
