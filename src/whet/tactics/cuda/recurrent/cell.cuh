// The cells of recurrent layers: activations over x and the direction d, and the next cell of an LSTM.
// Constants: ACT0, ACT1, ACT2: expressions over x and d; CLIP; INPUT_FORGET; PEEPHOLES.
DEV float clipped(float x) { return CLIP > 0.f ? min_nan(max_nan(x, -CLIP), CLIP) : x; }
DEV float act0(float x, int d) { return ACT0; }
DEV float act1(float x, int d) { return ACT1; }
DEV float act2(float x, int d) { return ACT2; }
struct Peepholes { float i, o, f; };

// The next h of an LSTM's unit from the inputs of its gates; updates the cell c.
DEV float lstm_cell(float i, float o, float f, float g, float& c, const Peepholes& hole, int d) {
    const float old = c;
    const float in = act0(clipped(PEEPHOLES ? i + hole.i * old : i), d);
    const float keep = INPUT_FORGET ? 1.f - in : act0(clipped(PEEPHOLES ? f + hole.f * old : f), d);
    c = keep * old + in * act1(clipped(g), d);
    return act0(clipped(PEEPHOLES ? o + hole.o * c : o), d) * act2(c, d);
}
