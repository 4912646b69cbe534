"""First convolutions of a network: few input channels."""
