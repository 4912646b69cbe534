"""The signal-to-noise ratio of one tensor."""

from whet.precision.measures import compute_powers, to_decibels


def compute_snr(want, got):
    """In dB."""
    return to_decibels(*compute_powers(want, got))
