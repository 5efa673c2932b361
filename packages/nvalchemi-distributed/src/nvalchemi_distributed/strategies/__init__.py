"""How a forward runs on one rank's rows."""
