// Continue a prompt with a package of `titan-train export --to aoti`, without Python.
//
//   generate PACKAGE LAYERS KV_HEADS KEY_DIM VALUE_DIM COUNT ID...
//
// LAYERS to VALUE_DIM are in the package's export.json. ID... are the prompt's tokens; the COUNT most likely next ones are
// printed. The prompt runs through the entry "prefill", which takes two tokens and more; each new token through "decode".
#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

using torch::inductor::AOTIModelPackageLoader;

namespace {

// Tokens, positions and every layer's keys and values in; logits and the caches out.
int64_t step(AOTIModelPackageLoader& entry, const std::vector<int64_t>& tokens, int64_t first,
             std::vector<at::Tensor>& caches) {
  const auto count = static_cast<int64_t>(tokens.size());
  std::vector<at::Tensor> inputs = {at::tensor(tokens, at::kLong).unsqueeze(0),
                                    at::arange(first, first + count, at::kLong).unsqueeze(0)};
  inputs.insert(inputs.end(), caches.begin(), caches.end());
  auto outputs = entry.run(inputs);
  caches.assign(outputs.begin() + 1, outputs.end());
  return outputs[0].select(1, count - 1).argmax().item<int64_t>();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 9) {
    std::cerr << "usage: generate PACKAGE LAYERS KV_HEADS KEY_DIM VALUE_DIM COUNT ID ID...\n";
    return 2;
  }
  const int64_t layers = std::atoll(argv[2]), heads = std::atoll(argv[3]);
  const int64_t key_dim = std::atoll(argv[4]), value_dim = std::atoll(argv[5]), count = std::atoll(argv[6]);
  std::vector<int64_t> prompt;
  for (int i = 7; i < argc; ++i) prompt.push_back(std::atoll(argv[i]));

  c10::InferenceMode inference;
  AOTIModelPackageLoader prefill(argv[1], "prefill"), decode(argv[1], "decode");
  const auto length = static_cast<int64_t>(prompt.size()) + count;
  std::vector<at::Tensor> caches;
  for (int64_t layer = 0; layer < layers; ++layer) {
    caches.push_back(at::zeros({1, heads, length, key_dim}));
    caches.push_back(at::zeros({1, heads, length, value_dim}));
  }
  int64_t token = step(prefill, prompt, 0, caches);
  for (int64_t made = 1;; ++made) {
    std::cout << token << (made < count ? ' ' : '\n');
    if (made >= count) return 0;
    token = step(decode, {token}, length - count + made - 1, caches);
  }
}
