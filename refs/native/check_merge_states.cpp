// Holds a merge_states against reference files, without Python. In this folder:
//
//     g++ -std=c++17 -O2 -I ../../ddtree_numba/include check_merge_states.cpp merge_states.cpp -o check_merge_states
//     ./check_merge_states ../merge_states_*.kdtr
//
// One line a file: the largest error of out in units of the largest element of the row's states, that of lse in units
// of max(1, |lse|), each with its bound, whether out and lse are exact beside an empty state, "ok" or what is wrong.
// The bounds are those of `python -m ddtree_numba check`.

#include "check.hpp"
#include "merge_states.hpp"

namespace {

using check::Shape, check::get;

constexpr double merge_bound = 4 * check::float32_eps;  // derived in ddtree_numba/check.py

// Half the spacing at 1 of the dtype of the outputs, which out may be rounded to; float32 is in merge_bound.
double rounding(kdtr::Dtype dtype) {
    return dtype == kdtr::Dtype::bfloat16 ? 0x1p-8 : dtype == kdtr::Dtype::float16 ? 0x1p-11 : 0;
}

check::Outcome check_file(const kdtr::File& file) {
    check::require(check::operator_of(file) == "merge_states", "the operator is not merge_states");
    const Shape& of_out = check::shape_of(file, "out", 4);
    const Shape of_lse(of_out.begin(), of_out.end() - 1);
    const std::vector<float> out_a = check::get_floats(file, "out_a", of_out);
    const std::vector<float> out_b = check::get_floats(file, "out_b", of_out);
    const float *wanted_out = get<float>(file, "out", of_out), *wanted_lse = get<float>(file, "lse", of_lse);
    States s{};
    s.kv_lora_rank = static_cast<std::int64_t>(of_out.back());
    s.num_rows = static_cast<std::int64_t>(out_a.size()) / s.kv_lora_rank;
    s.out_a = out_a.data();
    s.lse_a = get<float>(file, "lse_a", of_lse);
    s.out_b = out_b.data();
    s.lse_b = get<float>(file, "lse_b", of_lse);
    std::vector<float> out = check::unwritten<float>(of_out), lse = check::unwritten<float>(of_lse);
    merge_states(s, out.data(), lse.data());

    const std::size_t columns = of_out.back();
    std::vector<double> units(lse.size(), 0.0);
    for (std::size_t i = 0; i < out.size(); ++i) {
        double& unit = units[i / columns];
        if (!std::isinf(s.lse_a[i / columns])) unit = std::max(unit, std::fabs(double(out_a[i])));
        if (!std::isinf(s.lse_b[i / columns])) unit = std::max(unit, std::fabs(double(out_b[i])));
    }
    for (double& unit : units)
        if (!(unit > 0)) unit = 1;
    const auto alone = [&](std::size_t row) { return std::isinf(s.lse_a[row]) || std::isinf(s.lse_b[row]); };

    check::Outcome outcome;
    outcome.keep("out", of_out, out.data());
    outcome.keep("lse", of_lse, lse.data());
    outcome.close("out", of_out, out, wanted_out, [&](std::size_t i) { return units[i / columns]; },
                  merge_bound + rounding(file.at("out_a").dtype));
    outcome.close("lse", of_lse, lse, wanted_lse, [&](std::size_t i) { return check::lse_unit(wanted_lse[i]); },
                  merge_bound);
    const std::string where = " beside an empty state";
    outcome.equal_where("out" + where, of_out, out.data(), wanted_out, out.size(),
                        [&](std::size_t i) { return alone(i / columns); });
    outcome.equal_where("lse" + where, of_lse, lse.data(), wanted_lse, lse.size(), alone);
    return outcome;
}

}  // namespace

int main(int argc, char** argv) { return check::run(argc, argv, check_file); }
