"""Cross-package tests: both packages are installed here, and ranks are started by either launcher."""

pytest_plugins = ("distmd_protocol.testkit.pytest_plugin",)
