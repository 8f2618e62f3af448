"""For `model.generate(custom_generate="<this repository>", trust_remote_code=True, draft=…, delta=…)`: the package does the work."""

# In a try block, since transformers would otherwise tell the user to install the module's name, which on PyPI is another project's.
try:
    from cactus.integrations.hf_generate import generate
except ModuleNotFoundError as error:
    raise ImportError("Install this repository's package first: pip install '.[models]' in a checkout.") from error

__all__ = ["generate"]
