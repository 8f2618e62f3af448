"""Start the page: arguments, models in the background, Gradio's server."""

import argparse

import torch

from cactus import pairs
from cactus.cli import add_pair_arguments
from cactus.page.app import HEAD, STYLES, build
from cactus.page.models import offered


def main(arguments: list[str] | None = None) -> None:
    """Serve the page until it is interrupted. Exits with status 2 and a sentence for arguments that cannot be served."""
    parser = argparse.ArgumentParser(prog="python app.py", description="The Cactus page.")
    parser.add_argument("--port", type=int, help="default: GRADIO_SERVER_PORT, else the first free one from 7860")
    add_pair_arguments(parser)
    args = parser.parse_args(arguments)
    try:
        bits = pairs.checked_bits(args.bits)
        if args.draft and not args.verifier:
            raise ValueError("--draft needs --verifier: the embedded pair brings its own draft.")
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("No CUDA device answers on this machine: choose --device cpu, or auto.")
    except ValueError as error:
        parser.error(str(error))
    models = offered(args.verifier, args.draft, args.device, args.dtype)
    loading = models.request(models.key(next(iter(models.choices)), bits))
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
