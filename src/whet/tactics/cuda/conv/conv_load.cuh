// Part of conv() (conv.cu): the last warp asks for input and weight tiles, tile after tile, as slots of the rings become free.
constexpr u32 STEP_BYTES = HALO ? BN * ROW : HOLD ? A_BYTES : A_BYTES + BN * ROW;
const int ahead = HOLD ? 0 : min(k1 - k0, STAGES);  // weights do not depend on the kernel in front: load them before waiting for it
const int tap0 = HALO ? k0 % taps : 0, c0 = HALO ? k0 / taps : 0;
Corner at_tile(p, first);  // divisions before the wait, not after it
const Walk at_first(p, k0);
for (int i = 0, tap = tap0, c = c0; i < ahead; ++i) {
    if (one) {
        const u32 bar = full + (HALO && ONCE ? 0 : 8 * i);  // ONCE: all weights on one barrier
        if (!(HALO && ONCE)) barrier_expect(bar, STEP_BYTES);
        else if (i == 0) barrier_expect(bar, ONCE * STEP_BYTES);
        load_box2(ring_b + i * B_BYTES, &p.b, bar, (HALO ? tap * p.csteps + c : k0 + i) * BK, at_tile.n0);
    }
    if (HALO && ++tap == taps) { tap = 0; ++c; }
}
if (HOLD && one) {
    barrier_expect(held, HOLD * BN * ROW);
    for (int i = 0; i < HOLD; ++i)
        load_box2(ring_b + i * B_BYTES, &p.b, held, (HALO ? i % taps * p.csteps + i / taps : i) * BK, at_tile.n0);
}
wait_for_previous();
int slot = 0, turn = 0, a_slot = 0, a_turn = 0;
for (int tile = first; tile < p.tiles; tile += stride) {
    if (tile != first) at_tile = Corner(p, tile);
    Walk at = at_first;
    int tap = tap0, c = c0;
    for (int k = k0; k < k1; ++k) {
        const u32 bar = full + 8 * slot;
        if (HALO && (k == k0 || tap == 0)) {
            if (a_turn > 0) barrier_wait(a_empty + 8 * a_slot, (a_turn - 1) & 1);
            if (one) {
#if DW
                barrier_expect(a_full + 8 * a_slot, p.box_bytes + DW_BYTES);
                load_bytes(dw_weights + a_slot * DW_BYTES, p.depthwise + c * (DW_BYTES / 4), DW_BYTES, a_full + 8 * a_slot);
#else
                barrier_expect(a_full + 8 * a_slot, p.box_bytes);
#endif
                load_box4(ring_a + a_slot * a_bytes, &p.a, a_full + 8 * a_slot, FIRST_CHANNEL c * BK, at_tile.w, at_tile.h, at_tile.image);
            }
            if (++a_slot == HALO) { a_slot = 0; ++a_turn; }
        }
        if (HALO && HOLD) {
            if (++tap == taps) { tap = 0; ++c; }
            continue;
        }
        const bool later = turn > 0 || slot >= ahead;
        if (turn > 0) barrier_wait(empty + 8 * slot, (turn - 1) & 1);
        if (one) {
            if (later) {
                barrier_expect(bar, STEP_BYTES);
                if (!HOLD) load_box2(ring_b + slot * B_BYTES, &p.b, bar, (HALO ? tap * p.csteps + c : k) * BK, at_tile.n0);
            }
            if (HALO) {
#if SECOND_INPUT == 1
            } else if (k >= p.first_steps) {
                load_box2(ring_a + slot * A_BYTES, &p.second, bar, (k - p.first_steps) * BK, at_tile.m0);
#elif SECOND_INPUT
            } else if (k >= p.first_steps) {
                load_window(ring_a + slot * A_BYTES, &p.second, bar, (k - p.first_steps) * BK, at_tile.second_w, at_tile.second_h, at_tile.second_image, 0, 0);
#endif
            } else if (IM2COL) {
                load_window(ring_a + slot * A_BYTES, &p.a, bar, FIRST_CHANNEL at.c * BK, at_tile.w, at_tile.h, at_tile.image, at.s * p.dil_w, at.r * p.dil_h);
            } else {
                load_box2(ring_a + slot * A_BYTES, &p.a, bar, FIRST_CHANNEL k * BK, at_tile.m0);
            }
        }
        if (IM2COL) at.next(p);
        if (HALO && ++tap == taps) { tap = 0; ++c; }
        if (++slot == STAGES) { slot = 0; ++turn; }
    }
}
