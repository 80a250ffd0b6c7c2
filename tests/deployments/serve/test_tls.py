"""Why `http.tls` has a HAProxy of its own: Ray Serve's cannot end TLS. If this fails, look again (docs/security.md)."""

import re

import pytest

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's, at import


def test_serves_haproxy_has_no_tls_on_any_side() -> None:
    from ray.serve._private import haproxy_templates

    lines = [
        line.strip()
        for name, text in vars(haproxy_templates).items()
        if name.endswith("_TEMPLATE") and isinstance(text, str)
        for line in text.splitlines()
    ]
    sockets = [line for line in lines if re.match(r"(bind|server) ", line)]
    assert any(line.startswith("bind {{ config.frontend_host }}") for line in sockets)
    assert any(line.startswith("server {{ server.name }}") for line in sockets)
    assert [line for line in sockets if re.search(r"\b(ssl|crt|alpn|ca-file)\b", line)] == []


def test_nothing_of_the_options_for_tls_reaches_haproxys_configuration() -> None:
    """`http_options.ssl_*` make replicas' own servers speak TLS, which HAProxy then does not speak to them."""
    from pathlib import Path

    from ray.serve._private import haproxy

    assert haproxy.__file__ is not None
    source = Path(haproxy.__file__).read_text()
    assert re.findall(r"ssl_(?:keyfile|certfile|ca_certs)", source) == []
    assert source.count("custom_global") == source.count("custom_defaults") == 1  # declared, and used nowhere


def test_serves_haproxy_has_no_bound_on_the_whole_time_of_headers() -> None:
    """Or docs/security.md need no longer warn of clients that send them byte by byte."""
    import dataclasses
    from pathlib import Path

    from ray.serve._private import haproxy

    fields = {field.name: field.default for field in dataclasses.fields(haproxy.HAProxyConfig)}
    assert fields["timeout_http_request_s"] is None
    assert haproxy.__file__ is not None
    assert "timeout_http_request_s=" not in Path(haproxy.__file__).read_text()
