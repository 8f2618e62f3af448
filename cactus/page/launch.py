"""Start the page: arguments, models in the background, Gradio's server."""

import argparse

from cactus import pairs
from cactus.cli import add_pair_arguments
from cactus.page.app import HEAD, STYLES, build
from cactus.page.models import offered


def main(arguments: list[str] | None = None) -> None:
    """Serve the page until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python app.py", description="The Cactus page.")
    parser.add_argument("--port", type=int, help="default: GRADIO_SERVER_PORT, else the first free one from 7860")
    add_pair_arguments(parser)
    args = parser.parse_args(arguments)
    models = offered(args.verifier, args.draft, args.device, args.dtype)
    loading = models.request(models.key(next(iter(models.choices)), args.bits or pairs.default_bits()))
    if pairs.zero_gpu():
        loading.exception()  # waits; what went wrong is on the page
    build(models).launch(
        server_port=args.port,
        css_paths=STYLES,
        head=HEAD,
        footer_links=["api"],
        run_history=False,
        ssr_mode=False,
        state_session_capacity=200,
        max_file_size=1,
    )
