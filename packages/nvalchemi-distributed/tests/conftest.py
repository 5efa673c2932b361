"""Every test module may start ranks; the plugin gives markers, header and the end of the worker pools."""

pytest_plugins = ("distmd_protocol.testkit.pytest_plugin",)
