"""Ray Serve on two nodes of one machine, for the tests of `boxcal.app.protocols.ray`."""
