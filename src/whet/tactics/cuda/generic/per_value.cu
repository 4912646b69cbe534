// A thread per value of the result, or per group of them. Constants: NUMBER (the type of arithmetic), KIND0 to KIND7 (kinds of the inputs),
// TO0 to TO2 (of the outputs), BODY: statements for index `i`, over in0(j), in1(j), ... (as NUMBER), at0(j), ... (as 64-bit integers) and put0(j, v), ...
#include "common.cuh"
#include "vector.cuh"

#include "arguments"
#include "numbers.cuh"
using Number = NUMBER;
#define INPUT(k) \
    auto in##k = [&](long long j) -> Number { return number<KIND##k, Number>(p.input[k], j); }; \
    auto at##k = [&](long long j) -> long long { return number<KIND##k, long long>(p.input[k], j); };
#define OUTPUT(k) \
    auto put##k = [&](long long j, Number v) { store<TO##k>(p.output[k], j, v); }; \
    auto got##k = [&](long long j) -> Number { return number<TO##k, Number>(p.output[k], j); }; \
    auto index##k = [&](long long j, long long v) { store<TO##k>(p.output[k], j, v); };

extern "C" __global__ void __launch_bounds__(256) per_value(const __grid_constant__ Args p) {
    let_next_start();
    wait_for_previous();
    const long long i = (long long)blockIdx.x * 256 + threadIdx.x;
    if (i >= p.count) return;
    INPUT(0) INPUT(1) INPUT(2) INPUT(3) INPUT(4) INPUT(5) INPUT(6) INPUT(7)
    OUTPUT(0) OUTPUT(1) OUTPUT(2)
    BODY
}
